"""Records which keys continue the limits of a key that they have replaced. Earlier rotations are not known: a key that
was made by one has an account of its own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0007"
down_revision = "r0006"


def upgrade() -> None:
    op.add_column("keys", sa.Column("account", sa.Text, nullable=False, server_default=""))
    op.create_index("ix_keys_account", "keys", ["account"])


def downgrade() -> None:
    op.drop_index("ix_keys_account", "keys")
    op.drop_column("keys", "account")
