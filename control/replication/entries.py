"""Organisations, tenants, keys and prices of the database as entries of the table: with the limits that hold, and the
scopes that the role of a key's user allows. What is revoked, long expired, or a disabled user's, is no entry."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import keys, memberships, organisations, prices, projects, users
from control.directory import account_limits
from control.directory.prices import shown as price_to_proto
from kvloom.v1.control_service_pb2 import KeyEntry, Limits, OrganisationEntry, Price, TenantEntry
from kvloom_common.tenancy.scopes import SCOPES_OF_ROLE
from kvloom_common.tenancy.table import EXPIRED_SECONDS

Tiers = Mapping[str, Mapping[str, Any]]


def _columns(table: sa.Table, names: str) -> list[sa.Column[Any]]:
    return [table.c[name] for name in names.split()]


_ORGANISATIONS: Final = sa.select(
    *_columns(organisations, "id tier limits disabled priority_classes default_priority_class")
)
_TENANTS: Final = sa.select(
    *_columns(projects, "id tier limits cache_scope models disabled priority_classes default_priority_class")
)
_KEYS: Final = (
    sa.select(
        *_columns(
            keys,
            "id digest project name scopes models tier limits expires_at user priority_classes default_priority_class "
            "account",
        ),
        memberships.c.role,
    )
    .join(projects, projects.c.id == keys.c.project)
    .outerjoin(users, users.c.id == keys.c.user)
    .outerjoin(
        memberships,
        sa.and_(memberships.c.user == keys.c.user, memberships.c.organisation == projects.c.organisation),
    )
    .where(keys.c.revoked_at.is_(None), sa.or_(keys.c.user.is_(None), sa.not_(users.c.disabled)))
)


async def read_organisations(
    connection: AsyncConnection, tiers: Tiers, which: Collection[str] | None = None, *, after: str = "", limit: int = 0
) -> list[OrganisationEntry]:
    """Those with these ids, or the first ones behind an id; likewise the functions below."""
    rows = await _rows(connection, _ORGANISATIONS, organisations.c.id, which, after, limit)
    return [
        OrganisationEntry(
            id=one,
            limits=_limits(tier, limits, tiers),
            disabled=disabled,
            priority_classes=classes,
            default_priority_class=default,
        )
        for one, tier, limits, disabled, classes, default in rows
    ]


async def read_tenants(
    connection: AsyncConnection, tiers: Tiers, which: Collection[str] | None = None, *, after: str = "", limit: int = 0
) -> list[TenantEntry]:
    rows = await _rows(connection, _TENANTS, projects.c.id, which, after, limit)
    return [
        TenantEntry(
            id=one,
            limits=_limits(tier, limits, tiers),
            cache_scope=cache_scope,
            models=models,
            disabled=disabled,
            priority_classes=classes,
            default_priority_class=default,
        )
        for one, tier, limits, cache_scope, models, disabled, classes, default in rows
    ]


async def read_keys(
    connection: AsyncConnection, tiers: Tiers, which: Collection[str] | None = None, *, after: str = "", limit: int = 0
) -> list[KeyEntry]:
    is_kept = sa.or_(
        keys.c.expires_at.is_(None),
        keys.c.expires_at > time.time() - EXPIRED_SECONDS,
        keys.c.digest.is_(None),  # the entry of an identity, which would be free of its restrictions without it
    )
    rows = await _rows(connection, _KEYS.where(is_kept), keys.c.id, which, after, limit)
    return [
        KeyEntry(
            id=row.id,
            digest=row.digest or b"",
            tenant=row.project,
            name=row.name,
            scopes=_allowed(row.scopes, row.role) if row.user is not None else row.scopes,
            models=row.models,
            expires_at=row.expires_at or 0.0,
            limits=_limits(row.tier, row.limits, tiers),
            user=row.user or "",
            priority_classes=row.priority_classes,
            default_priority_class=row.default_priority_class,
            account=row.account,
        )
        for row in rows
    ]


async def read_prices(connection: AsyncConnection) -> list[Price]:
    rows = await connection.execute(sa.select(prices).order_by(prices.c.id))
    return [price_to_proto(row) for row in rows.mappings()]


async def _rows(
    connection: AsyncConnection,
    query: sa.Select[Any],
    key: sa.Column[str],
    which: Collection[str] | None,
    after: str,
    limit: int,
) -> Sequence[Any]:
    chosen = query.where(key.in_(which)) if which is not None else query.where(key > after).order_by(key).limit(limit)
    return (await connection.execute(chosen)).all()


def _limits(tier: str | None, own: Mapping[str, Any], tiers: Tiers) -> Limits | None:
    """None for none, as most keys have: half the size of an entry."""
    return account_limits.effective(tier, own, tiers) if tier or own else None


def _allowed(scopes: Sequence[str], role: str | None) -> list[str]:
    allowed = next((found for known, found in SCOPES_OF_ROLE.items() if known == role), frozenset[str]())
    return [scope for scope in scopes if scope in allowed]
