"""The keys of copies of conversations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0006_hot_keys"
down_revision = "r0005"


def upgrade() -> None:
    op.create_table(
        "hot_keys",
        sa.Column("conversation", sa.Text, primary_key=True),
        sa.Column("key", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("hot_keys")
