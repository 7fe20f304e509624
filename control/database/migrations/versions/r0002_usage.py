"""Usage records, their answers and daily sums, spending of accounts, leases of budgets, and alerts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0002"
down_revision = "r0001"


def upgrade() -> None:
    op.create_table(
        "usage_records",
        sa.Column("producer", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("answer_id", sa.Text, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_usage_records_answer", "usage_records", ["request_id", "answer_id"])
    op.create_index("ix_usage_records_ended_at", "usage_records", ["ended_at"])
    op.create_table(
        "usage_producers",
        sa.Column("producer", sa.Text, primary_key=True),
        sa.Column("stored_number", sa.BigInteger, nullable=False),
        sa.Column("is_closed", sa.Boolean, nullable=False),
    )
    op.create_table(
        "usage_daily",
        sa.Column("day", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("tier", sa.Text, primary_key=True),
        sa.Column("num_requests", sa.BigInteger, nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_reasoning_tokens", sa.BigInteger, nullable=False),
        sa.Column("block_milliseconds", sa.BigInteger, nullable=False),
        sa.Column("cost_nanos", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_usage_daily_tenant", "usage_daily", ["tenant", "day"])
    op.create_table(
        "budget_spending",
        sa.Column("account", sa.Text, primary_key=True),
        sa.Column("unit", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("period", sa.Text, primary_key=True),
        sa.Column("spent", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "budget_leases",
        sa.Column("account", sa.Text, primary_key=True),
        sa.Column("unit", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("period", sa.Text, primary_key=True),
        sa.Column("producer", sa.Text, primary_key=True),
        sa.Column("leased", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_budget_leases_producer", "budget_leases", ["producer"])
    op.create_table(
        "budget_alerts",
        sa.Column("account", sa.Text, primary_key=True),
        sa.Column("unit", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("period", sa.Text, primary_key=True),
        sa.Column("percent", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("spent", sa.BigInteger, nullable=False),
        sa.Column("limit", sa.BigInteger, nullable=False),
        sa.Column("reached_at", sa.Double, nullable=False),
        sa.Column("num_tries", sa.Integer, nullable=False),
        sa.Column("sent_at", sa.Double),
    )


def downgrade() -> None:
    for table in (
        "budget_alerts",
        "budget_leases",
        "budget_spending",
        "usage_daily",
        "usage_producers",
        "usage_records",
    ):
        op.drop_table(table)
