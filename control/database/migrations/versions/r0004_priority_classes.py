"""The priority classes that organisations, projects and keys may name, and the default ones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0004"
down_revision = "r0003"

_TABLES = ("organisations", "projects", "keys")


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(table, sa.Column("priority_classes", sa.JSON, nullable=False, server_default="[]"))
        op.add_column(table, sa.Column("default_priority_class", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    for table in _TABLES:
        op.drop_column(table, "default_priority_class")
        op.drop_column(table, "priority_classes")
