"""The ids of identities that have no key end with their project. Followers get the whole table, since theirs has the
old ids."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision = "r0009"
down_revision = "r0008"

_PROJECT = "replace(replace(tenant, 'shadow:', ''), 'discarded:', '')"
_OF_IDENTITY = "key_id LIKE 'oidc:%' OR key_id LIKE 'cert:%'"
_ACCOUNTS = ("budget_spending", "budget_leases", "budget_alerts")


def upgrade() -> None:
    op.execute(f"UPDATE usage_daily SET key_id = key_id || '@' || {_PROJECT} WHERE {_OF_IDENTITY}")
    for table in _ACCOUNTS:
        op.execute(
            f"UPDATE {table} SET account = account || '@' || (SELECT project FROM keys "
            f"WHERE 'key:' || id = {table}.account) "
            "WHERE account IN (SELECT 'key:' || id FROM keys WHERE digest IS NULL)"
        )
    op.execute("UPDATE keys SET id = id || '@' || project WHERE digest IS NULL")
    _new_table()


def downgrade() -> None:
    for table in _ACCOUNTS:
        op.execute(
            f"UPDATE {table} SET account = (SELECT 'key:' || {_without_project('id', 'project')} FROM keys "
            f"WHERE 'key:' || id = {table}.account) "
            "WHERE account IN (SELECT 'key:' || id FROM keys WHERE digest IS NULL)"
        )
    op.execute(f"UPDATE keys SET id = {_without_project('id', 'project')} WHERE digest IS NULL")
    op.execute(f"UPDATE usage_daily SET key_id = {_without_project('key_id', _PROJECT)} WHERE {_OF_IDENTITY}")
    _new_table()


def _without_project(column: str, project: str) -> str:
    return f"substr({column}, 1, length({column}) - length({project}) - 1)"


def _new_table() -> None:
    state = sa.table("table_state", sa.column("table_id", sa.Text))
    op.execute(sa.update(state).values(table_id=uuid.uuid4().hex))
