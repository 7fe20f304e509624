"""Quotas of organisations, and the ids that were used once, as far as the audit knows them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0006"
down_revision = "r0005"

_KINDS = (
    ("organisation", "org:", "DeleteOrganisation", "organisations"),
    ("tenant", "tenant:", "DeleteProject", "projects"),
    ("user", "user:", "DeleteUser", "users"),
)


def upgrade() -> None:
    op.add_column("organisations", sa.Column("quotas", sa.JSON, nullable=False, server_default="{}"))
    op.create_table(
        "used_ids",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("organisation", sa.Text, nullable=False),
    )
    op.create_index("ix_used_ids_organisation", "used_ids", ["organisation"])
    for kind, prefix, action, table in _KINDS:
        # What was made again is there, and stays there; only its next end is final.
        op.execute(
            f"INSERT INTO used_ids (kind, id, organisation) "
            f"SELECT '{kind}', substr(target, {len(prefix) + 1}), min(organisation) FROM audit "
            f"WHERE action = '{action}' AND substr(target, 1, {len(prefix)}) = '{prefix}' "
            f"AND substr(target, {len(prefix) + 1}) NOT IN (SELECT id FROM {table}) GROUP BY target"
        )


def downgrade() -> None:
    op.drop_table("used_ids")
    op.drop_column("organisations", "quotas")
