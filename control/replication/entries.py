"""Organisations, tenants, keys and prices of the database as entries of the table: with the limits that hold, and the
scopes that the role of a key's user allows. A key that is revoked, long expired, or a disabled user's, is no entry. An
identity that has no key keeps its entry, which then says that it has ended: without one it would have all that its
issuer gives it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import keys, memberships, organisations, prices, projects, users
from control.directory import account_limits, kv_shares
from control.directory.prices import shown as price_to_proto
from kvloom.v1.control_service_pb2 import KeyEntry, Limits, OrganisationEntry, Price, TenantEntry
from kvloom_common.tenancy.scopes import SCOPES_OF_ROLE
from kvloom_common.tenancy.table import EXPIRED_SECONDS

Tiers = Mapping[str, Mapping[str, Any]]


def _columns(table: sa.Table, names: str) -> list[sa.Column[Any]]:
    return [table.c[name] for name in names.split()]


_ORGANISATIONS: Final = sa.select(
    *_columns(organisations, "id tier limits disabled priority_classes default_priority_class residency")
)
_TENANTS: Final = sa.select(
    *_columns(
        projects,
        "id tier limits operator_set cache_scope models disabled priority_classes default_priority_class residency "
        "guardrails",
    )
)
_ENDED: Final = 1.0
"""An expiry that has passed: that of an identity which was revoked, or whose user is disabled or gone."""
_IS_ACCEPTED: Final = sa.and_(
    keys.c.revoked_at.is_(None), sa.or_(keys.c.user.is_(None), users.c.disabled.is_(sa.false()))
)
_KEYS: Final = (
    sa.select(
        *_columns(
            keys,
            "id digest project name scopes models tier limits operator_set expires_at user priority_classes "
            "default_priority_class account",
        ),
        memberships.c.role,
        _IS_ACCEPTED.label("is_accepted"),
    )
    .join(projects, projects.c.id == keys.c.project)
    .outerjoin(users, users.c.id == keys.c.user)
    .outerjoin(
        memberships,
        sa.and_(memberships.c.user == keys.c.user, memberships.c.organisation == projects.c.organisation),
    )
)


async def read_organisations(
    connection: AsyncConnection, tiers: Tiers, which: Collection[str] | None = None, *, after: str = "", limit: int = 0
) -> list[OrganisationEntry]:
    """Returns the entries with these ids, or, as the functions below do, the first ones behind an id."""
    rows = await _rows(connection, _ORGANISATIONS, organisations.c.id, which, after, limit)
    remaining = await kv_shares.remaining(connection, [(row.id, row.tier, row.limits) for row in rows], tiers)
    return [
        OrganisationEntry(
            id=one,
            limits=_limits(tier, {**limits, **remaining.get(one, {})}, tiers),
            disabled=disabled,
            priority_classes=classes,
            default_priority_class=default,
            residency=residency,
        )
        for one, tier, limits, disabled, classes, default, residency in rows
    ]


async def read_tenants(
    connection: AsyncConnection, tiers: Tiers, which: Collection[str] | None = None, *, after: str = "", limit: int = 0
) -> list[TenantEntry]:
    rows = await _rows(connection, _TENANTS, projects.c.id, which, after, limit)
    return [
        TenantEntry(
            id=one,
            limits=_limits(tier, limits, tiers, operator_set),
            cache_scope=cache_scope,
            models=models,
            disabled=disabled,
            priority_classes=classes,
            default_priority_class=default,
            residency=residency,
            guardrails=guardrails,
        )
        for one, tier, limits, operator_set, cache_scope, models, disabled, classes, default, residency, guardrails in (
            rows
        )
    ]


async def read_keys(
    connection: AsyncConnection, tiers: Tiers, which: Collection[str] | None = None, *, after: str = "", limit: int = 0
) -> list[KeyEntry]:
    is_recent = sa.or_(keys.c.expires_at.is_(None), keys.c.expires_at > time.time() - EXPIRED_SECONDS)
    is_kept = sa.or_(sa.and_(_IS_ACCEPTED, is_recent), keys.c.digest.is_(None))
    rows = await _rows(connection, _KEYS.where(is_kept), keys.c.id, which, after, limit)
    return [_key(row, tiers) for row in rows]


def _key(row: Any, tiers: Tiers) -> KeyEntry:
    return KeyEntry(
        id=row.id,
        digest=row.digest or b"",
        tenant=row.project,
        name=row.name,
        scopes=_allowed(row.scopes, row.role) if row.user is not None else row.scopes,
        models=row.models,
        expires_at=(row.expires_at or 0.0) if row.is_accepted else _ENDED,
        limits=_limits(row.tier, row.limits, tiers, row.operator_set),
        user=row.user or "",
        priority_classes=row.priority_classes,
        default_priority_class=row.default_priority_class,
        account=row.account,
    )


async def read_prices(connection: AsyncConnection) -> list[Price]:
    rows = await connection.execute(sa.select(prices).order_by(prices.c.id))
    return [price_to_proto(row) for row in rows.mappings()]


async def _rows(
    connection: AsyncConnection,
    query: sa.Select[*tuple[Any, ...]],
    key: sa.Column[str],
    which: Collection[str] | None,
    after: str,
    limit: int,
) -> Sequence[Any]:
    chosen = query.where(key.in_(which)) if which is not None else query.where(key > after).order_by(key).limit(limit)
    return (await connection.execute(chosen)).all()


def _limits(
    tier: str | None, own: Mapping[str, Any], tiers: Tiers, operator_set: Mapping[str, Any] | None = None
) -> Limits | None:
    """None for none, as most keys have: half the size of an entry."""
    found = account_limits.effective(tier, own, tiers, operator_set)
    return account_limits.shown(found) if found else None


def _allowed(scopes: Sequence[str], role: str | None) -> list[str]:
    allowed = next((found for known, found in SCOPES_OF_ROLE.items() if known == role), frozenset[str]())
    return [scope for scope in scopes if scope in allowed]
