"""Organisations, projects and keys are accounts, which have a tier, limits and priority classes: how all of them are
found, listed and shown.

Finds the columns that an update mask changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import sqlalchemy as sa
from google.protobuf import field_mask_pb2
from sqlalchemy.ext.asyncio import AsyncConnection

from control.directory import account_limits, operator_settings, priority_classes, quotas
from control.directory.actor import Actor, failed_precondition, not_found
from control.directory.pages import PageRequest, read_page
from control.directory.transaction import DirectoryChange, read_tiers
from kvloom.errors import invalid_argument
from kvloom.v1 import directory_service_pb2 as pb

MAX_PATHS: Final = 64
"""A mask has at most so many paths; no message has so many fields and limits."""


def masked_values(
    mask: field_mask_pb2.FieldMask, message: Any, readers: Mapping[str, Callable[[Any], Any]], row: Mapping[Any, Any]
) -> dict[str, Any]:
    """The columns to be set. `readers` return the checked value of a field of the message, by its name, which is also
    that of its column. Raises KvloomError (INVALID_ARGUMENT) for fields that cannot be changed."""
    if not mask.paths:
        raise invalid_argument("The mask has to name the fields to be changed.", "update_mask")
    if len(mask.paths) > MAX_PATHS:
        raise invalid_argument(f"The mask has at most {MAX_PATHS} fields.", "update_mask")
    values: dict[str, Any] = {}
    for path in mask.paths:
        field, _, limit = path.partition(".")
        if field not in readers or (limit and field != "limits"):
            raise invalid_argument(f"{path[:64]!r} cannot be changed.", "update_mask")
        if not limit:
            values[field] = readers[field](message)
            continue
        try:
            values[field] = account_limits.with_limit(values.get(field, row[field]), message.limits, limit)
        except KeyError:
            raise invalid_argument(f"There is no limit {limit[:64]!r}.", "update_mask") from None
    return values


def known_tier(actor: Actor, name: str, before: str | None, tiers: Mapping[str, Any]) -> str | None:
    """The column of a tier, which only the operator changes. Raises KvloomError (PERMISSION_DENIED), and
    FAILED_PRECONDITION if there is no such tier."""
    if (name or None) == before:
        return before
    actor.require_operator("the tier of limits of an account")
    if name and name not in tiers:
        there_are = ", ".join(sorted(tiers)) or "none"
        raise failed_precondition(f"There is no tier of limits {name[:64]!r}. Tiers: {there_are}.")
    return name or None


Row = Mapping[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class AccountKind:
    """One kind of account: its columns have the names of the message's fields."""

    noun: str
    """It is also the field of the messages of DirectoryService's methods."""
    table: sa.Table
    message: Any
    organisation_of: Callable[[Row], str]
    """Returns the organisation of a row."""

    async def find(self, connection: AsyncConnection, id_: str) -> sa.RowMapping | None:
        """Returns the row of this id; None: there is none."""
        return (await connection.execute(sa.select(self.table).where(self.table.c.id == id_))).mappings().first()

    async def require(self, connection: AsyncConnection, actor: Actor, id_: str) -> sa.RowMapping:
        """Returns the row of this id. Raises KvloomError (NOT_FOUND), also if it is none of the actor's."""
        row = await self.find(connection, id_)
        if row is None or not actor.sees(self.organisation_of(row)):
            raise not_found(self.noun, id_)
        return row

    async def get(self, connection: AsyncConnection, actor: Actor, request: Any) -> Any:
        """Answers the method Get. Raises KvloomError (NOT_FOUND)."""
        row = await self.require(connection, actor, request.id)
        response = getattr(pb, f"Get{self.noun.title()}Response")
        return response(**{self.noun: self.shown(row, await read_tiers(connection))})

    async def page(self, connection: AsyncConnection, query: sa.Select[Any], request: PageRequest) -> Any:
        """Answers the method List with a page of the rows of a query."""
        rows, token = await read_page(connection, query, self.table.c.id, request)
        tiers = await read_tiers(connection)
        response = getattr(pb, f"List{self.noun.title()}sResponse")
        return response(**{f"{self.noun}s": [self.shown(row, tiers) for row in rows]}, next_page_token=token)

    def readers(
        self, change: DirectoryChange, before: Row, tiers: Mapping[str, Any]
    ) -> dict[str, Callable[[Any], Any]]:
        """Returns for each field that all kinds have what reads and checks it in a message, which raises KvloomError.
        `before`: the row."""
        return {
            "tier": lambda one: known_tier(change.actor, one.tier, before.get("tier"), tiers),
            "limits": lambda one: account_limits.stored(one.limits, f"{self.noun}.limits"),
            **priority_classes.readers(self.noun, {**priority_classes.NONE_GIVEN, **before}),
        }

    def shown(self, row: Row, tiers: Mapping[str, Row]) -> Any:
        """Returns the message of a row, with the limits that are in force."""
        operator_set = row.get(operator_settings.COLUMN)
        in_force = account_limits.effective(row["tier"], row["limits"], tiers, operator_set)
        fields = {name: row[name] for name in self.message.DESCRIPTOR.fields_by_name if row.get(name) is not None}
        fields |= {"limits": account_limits.shown(row["limits"]), "effective_limits": account_limits.shown(in_force)}
        if operator_set is not None:
            fields["operator_limits"] = account_limits.shown(operator_settings.limits_of(operator_set))
        if "quotas" in fields:
            fields["quotas"] = quotas.shown(row["quotas"])
        return self.message(**fields)
