"""The sums of usage by priority class. Until now, the class of a request was that of its tier."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0005"
down_revision = "r0004"

_KEY = ("day", "tenant", "key_id", "model", "tier")
_SUMS = (
    "num_requests",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_reasoning_tokens",
    "block_milliseconds",
    "cost_nanos",
)


def upgrade() -> None:
    _replace((*_KEY, "priority_class"), "tier")


def downgrade() -> None:
    _replace(_KEY, "")


def _replace(key: tuple[str, ...], class_of_old: str) -> None:
    """With a table of another primary key, which SQLite cannot change. `class_of_old`: the column of the old rows that
    says their class; "": the new table has none, and sums over them."""
    op.rename_table("usage_daily", "usage_daily_old")
    op.create_table(
        "usage_daily",
        *(sa.Column(name, sa.Text, nullable=False) for name in key),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _SUMS),
        # Another name than the old one's, which PostgreSQL still has.
        sa.PrimaryKeyConstraint(*key, name=f"pk_usage_daily_{len(key)}"),
    )
    sums = ", ".join(f"CAST(SUM({name}) AS BIGINT)" for name in _SUMS)
    values = ", ".join((*_KEY, *([class_of_old] if class_of_old else ())))
    op.execute(
        f"INSERT INTO usage_daily ({', '.join((*key, *_SUMS))}) SELECT {values}, {sums} FROM usage_daily_old "
        f"GROUP BY {', '.join(_KEY)}"
    )
    op.drop_table("usage_daily_old")
    op.create_index("ix_usage_daily_tenant", "usage_daily", ["tenant", "day"])
