"""Organisations, projects, users, keys, limits, prices, audit, and the log of changes."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision = "r0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "limit_tiers",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("limits", sa.JSON, nullable=False),
    )
    op.create_table(
        "organisations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tier", sa.Text, sa.ForeignKey("limit_tiers.name"), index=True),
        sa.Column("limits", sa.JSON, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("organisation", sa.Text, sa.ForeignKey("organisations.id"), nullable=False, index=True),
        sa.Column("tier", sa.Text, sa.ForeignKey("limit_tiers.name"), index=True),
        sa.Column("limits", sa.JSON, nullable=False),
        sa.Column("cache_scope", sa.Text, nullable=False),
        sa.Column("models", sa.JSON, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "memberships",
        sa.Column("organisation", sa.Text, sa.ForeignKey("organisations.id"), primary_key=True),
        sa.Column("user", sa.Text, sa.ForeignKey("users.id", ondelete="CASCADE"), primary_key=True, index=True),
        sa.Column("role", sa.Text, nullable=False),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("digest", sa.LargeBinary, unique=True),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("project", sa.Text, sa.ForeignKey("projects.id"), nullable=False, index=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("user", sa.Text, index=True),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("models", sa.JSON, nullable=False),
        sa.Column("tier", sa.Text, sa.ForeignKey("limit_tiers.name"), index=True),
        sa.Column("limits", sa.JSON, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("last_used_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
    )
    op.create_table(
        "prices",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("effective_from", sa.Double, nullable=False),
        sa.Column("prompt_nanos", sa.BigInteger, nullable=False),
        sa.Column("cached_nanos", sa.BigInteger, nullable=False),
        sa.Column("output_nanos", sa.BigInteger, nullable=False),
        sa.Column("request_nanos", sa.BigInteger, nullable=False),
        sa.Column("batch_percent", sa.Integer, nullable=False),
        sa.Column("result_cache_percent", sa.Integer, nullable=False),
        sa.UniqueConstraint("model", "effective_from"),
    )
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("organisation", sa.Text, nullable=False, index=True),
        sa.Column("before", sa.JSON),
        sa.Column("after", sa.JSON),
    )
    table_state = op.create_table(
        "table_state",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("table_id", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("oldest_version", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "changes",
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("entry", sa.Text, primary_key=True),
    )
    op.bulk_insert(table_state, [{"id": 1, "table_id": uuid.uuid4().hex, "version": 1, "oldest_version": 1}])


def downgrade() -> None:
    for table in ("changes", "table_state", "audit", "prices", "keys", "memberships", "users", "projects"):
        op.drop_table(table)
    op.drop_table("organisations")
    op.drop_table("limit_tiers")
