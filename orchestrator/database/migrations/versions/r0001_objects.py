"""Stored objects, and the items of conversations and responses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "objects",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("parent", sa.Text, nullable=False, server_default=""),
        sa.Column("label", sa.Text, nullable=False, server_default=""),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_objects_expires_at", "objects", ["expires_at"])
    op.create_index("ix_objects_list", "objects", ["tenant", "kind", "created_at", "id"])
    op.create_table(
        "items",
        sa.Column("parent", sa.Text, primary_key=True),
        sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("is_output", sa.Boolean, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_items_id", "items", ["tenant", "id"])


def downgrade() -> None:
    op.drop_table("items")
    op.drop_table("objects")
