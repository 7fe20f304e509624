"""The guaranteed shares of KV blocks, of which all accounts together may have a part only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import organisations, projects
from control.directory.transaction import DirectoryChange, read_tiers
from kvloom.errors import invalid_argument
from kvloom_common.kv_share import MAX_KV_SHARES_PERCENT

FIELD: Final = "kv_share_percent"


async def check(change: DirectoryChange, tier: str | None, limits: Mapping[str, Any], field: str) -> None:
    """Raises KvloomError (INVALID_ARGUMENT) if too much is guaranteed now that an account, or a tier, has these limits.
    To be called after the change; nothing is read if it has no share."""
    tiers = await change.tiers() if tier else {}
    if not _share(tier, limits, tiers):
        return
    total = await _total_percent(change.connection)
    if total > MAX_KV_SHARES_PERCENT:
        raise invalid_argument(
            f"All guaranteed shares of KV blocks would be {total}% together; at most {MAX_KV_SHARES_PERCENT}% can be.",
            f"{field}.{FIELD}",
        )


def refuse(limits: Mapping[str, Any], field: str) -> None:
    """Raises KvloomError (INVALID_ARGUMENT) if the limits of a key have a share."""
    if limits.get(FIELD):
        raise invalid_argument(
            "A key has no share of KV blocks of its own: give it to its project or organisation.", f"{field}.{FIELD}"
        )


async def _total_percent(connection: AsyncConnection) -> int:
    tiers = await read_tiers(connection)
    with_share = [name for name, limits in tiers.items() if limits.get(FIELD)]
    total = 0
    for table in (organisations, projects):
        has_share = sa.or_(table.c.limits[FIELD].as_integer() > 0, table.c.tier.in_(with_share))
        rows = await connection.execute(sa.select(table.c.tier, table.c.limits).where(has_share))
        total += sum(_share(tier, limits, tiers) for tier, limits in rows)
    return total


def _share(tier: str | None, limits: Mapping[str, Any], tiers: Mapping[str, Mapping[str, Any]]) -> int:
    share: int = limits.get(FIELD) or tiers.get(tier or "", {}).get(FIELD, 0)
    return share
