"""The order in which the lines of a batch are answered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0007_batch_turns"
down_revision = "r0006_hot_keys"


def upgrade() -> None:
    op.add_column("batch_lines", sa.Column("turn", sa.BigInteger, nullable=False, server_default="0"))
    op.execute("UPDATE batch_lines SET turn = line")
    op.create_index("ix_batch_lines_turn", "batch_lines", ["batch", "state", "turn", "line"])


def downgrade() -> None:
    op.drop_index("ix_batch_lines_turn", "batch_lines")
    op.drop_column("batch_lines", "turn")
