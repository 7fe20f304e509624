"""Settings of the operator on projects, keys and users. It is not known who set what there is: of projects, and of
identities, it counts as the operator's, and so do the limits of keys with a tier."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "r0008"
down_revision = "r0007"

_TABLES = ("projects", "keys", "users")
_OF_PROJECTS = ("limits", "models", "priority_classes", "disabled")
_OF_IDENTITIES = ("limits", "models", "priority_classes", "scopes", "expires_at")


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(table, sa.Column("operator_set", sa.JSON, nullable=False, server_default="{}"))
    _settle(_table("projects", _OF_PROJECTS), _OF_PROJECTS, None)
    keys = _table("keys", _OF_IDENTITIES)
    _settle(keys, _OF_IDENTITIES, keys.c.digest.is_(None))
    _settle(keys, ("limits",), sa.and_(keys.c.digest.is_not(None), keys.c.tier.is_not(None)))


def downgrade() -> None:
    for table in _TABLES:
        op.drop_column(table, "operator_set")


def _table(name: str, columns: tuple[str, ...]) -> Any:
    others = {"disabled": sa.Boolean, "expires_at": sa.Double}
    typed = [sa.column(one, others.get(one, sa.JSON)) for one in (*columns, "operator_set")]
    return sa.table(name, *typed, sa.column("id", sa.Text), sa.column("digest"), sa.column("tier"))


def _settle(table: Any, names: tuple[str, ...], which: Any) -> None:
    query = sa.select(table.c.id, *(table.c[name] for name in names))
    connection = op.get_bind()
    for row in connection.execute(query if which is None else query.where(which)).mappings().all():
        if found := {name: row[name] for name in names if row[name]}:
            connection.execute(sa.update(table).where(table.c.id == row["id"]).values(operator_set=found))
