"""The tables of usage. Days and months are those of UTC: "2026-11-25", "2026-11"."""

from __future__ import annotations

import sqlalchemy as sa

from control.database.schema import metadata

# What routers have reported, as it came. Of the records of one answer, one counts
# (kvloom_common/tenancy/usage_record.py).
usage_records = sa.Table(
    "usage_records",
    metadata,
    sa.Column("producer", sa.Text, primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("request_id", sa.Text, nullable=False),
    sa.Column("answer_id", sa.Text, nullable=False),
    sa.Column("ended_at", sa.Double, nullable=False, index=True),
    sa.Column("record", sa.LargeBinary, nullable=False),
    sa.Index("ix_usage_records_answer", "request_id", "answer_id"),
)

# All records up to `stored_number` are in the table.
usage_producers = sa.Table(
    "usage_producers",
    metadata,
    sa.Column("producer", sa.Text, primary_key=True),
    sa.Column("stored_number", sa.BigInteger, nullable=False),
    sa.Column("is_closed", sa.Boolean, nullable=False),
)

# The sums over the answers of a day. `model` is MODEL:ADAPTER for an adapter.
usage_daily = sa.Table(
    "usage_daily",
    metadata,
    sa.Column("day", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("tier", sa.Text, primary_key=True),
    sa.Column("priority_class", sa.Text, primary_key=True),
    sa.Column("num_requests", sa.BigInteger, nullable=False),
    sa.Column("num_prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_output_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_reasoning_tokens", sa.BigInteger, nullable=False),
    sa.Column("block_milliseconds", sa.BigInteger, nullable=False),
    sa.Column("cost_nanos", sa.BigInteger, nullable=False),
    sa.Index("ix_usage_daily_tenant", "tenant", "day"),
)

# What an account has spent of a unit (BudgetUnit in control_service.proto) in a period, by the records.
budget_spending = sa.Table(
    "budget_spending",
    metadata,
    sa.Column("account", sa.Text, primary_key=True),
    sa.Column("unit", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("period", sa.Text, primary_key=True),
    sa.Column("spent", sa.BigInteger, nullable=False),
)

# What a router may spend, and what it has spent of it without that its records have arrived; and the last change that
# it has asked for, in case that it asks for it again.
budget_leases = sa.Table(
    "budget_leases",
    metadata,
    sa.Column("account", sa.Text, primary_key=True),
    sa.Column("unit", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("period", sa.Text, primary_key=True),
    sa.Column("producer", sa.Text, primary_key=True, index=True),
    sa.Column("leased", sa.BigInteger, nullable=False),
    sa.Column("number", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("granted", sa.BigInteger, nullable=False, server_default="0"),
)

# Thresholds that were reached, each once. `sent_at` is empty until a webhook has got it.
budget_alerts = sa.Table(
    "budget_alerts",
    metadata,
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
