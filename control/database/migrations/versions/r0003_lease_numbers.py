"""The last change of each lease of a budget, which a router may ask for again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0003"
down_revision = "r0002"

_COLUMNS = ("number", "granted")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("budget_leases", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    for name in _COLUMNS:
        op.drop_column("budget_leases", name)
