"""Says in which cells the requests of organisations and projects may be computed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0010"
down_revision = "r0009"

_TABLES = ("organisations", "projects")


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(table, sa.Column("residency", sa.JSON, nullable=False, server_default="[]"))


def downgrade() -> None:
    for table in _TABLES:
        op.drop_column(table, "residency")
