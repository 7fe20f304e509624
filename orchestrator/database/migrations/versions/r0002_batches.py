"""Batches: who works at them, and their lines."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0002"
down_revision = "r0001"


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("held_until", sa.Double, nullable=False),
    )
    op.create_table(
        "batch_lines",
        sa.Column("batch", sa.Text, primary_key=True),
        sa.Column("line", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("custom_id", sa.Text, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("result", sa.LargeBinary),
    )
    op.create_index("ix_batch_lines_state", "batch_lines", ["batch", "state", "line"])


def downgrade() -> None:
    op.drop_table("batch_lines")
    op.drop_table("jobs")
