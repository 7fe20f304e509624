"""Vector stores: their files, and the chunks of these."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0004_vector_stores"
down_revision = "r0003"


def upgrade() -> None:
    op.create_table(
        "vector_stores",
        sa.Column("store", sa.Text, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("active_at", sa.Double, nullable=False),
    )
    op.create_table(
        "store_files",
        sa.Column("store", sa.Text, primary_key=True),
        sa.Column("file", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("batch", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("usage_bytes", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_store_files_list", "store_files", ["store", "created_at", "file"])
    op.create_index("ix_store_files_file", "store_files", ["file"])
    op.create_table(
        "store_chunks",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("store", sa.Text, nullable=False),
        sa.Column("file", sa.Text, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_store_chunks_place", "store_chunks", ["store", "file", "position"])


def downgrade() -> None:
    op.drop_table("store_chunks")
    op.drop_table("store_files")
    op.drop_table("vector_stores")
