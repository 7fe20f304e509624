"""Says which rules of the safety policy projects have chosen."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0011"
down_revision = "r0010"


def upgrade() -> None:
    op.add_column("projects", sa.Column("guardrails", sa.JSON, nullable=False, server_default="[]"))


def downgrade() -> None:
    op.drop_column("projects", "guardrails")
