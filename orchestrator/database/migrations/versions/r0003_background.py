"""Background responses: what is needed to generate them again, and their events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0003"
down_revision = "r0002"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("kind", sa.Text, nullable=False, server_default="batch"))
    op.create_table(
        "runs",
        sa.Column("response", sa.Text, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("priority_class", sa.Text, nullable=False),
        sa.Column("conversation", sa.Text, nullable=False),
        sa.Column("num_sent", sa.BigInteger, nullable=False),
        sa.Column("sent_digest", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "response_events",
        sa.Column("response", sa.Text, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("response_events")
    op.drop_table("runs")
    op.drop_column("jobs", "kind")
