"""Webhooks that are still to be sent."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0005"
down_revision = "r0004_vector_stores"


def upgrade() -> None:
    op.create_table(
        "deliveries",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("event", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("num_tries", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_deliveries_endpoint", "deliveries", ["endpoint"])


def downgrade() -> None:
    op.drop_table("deliveries")
