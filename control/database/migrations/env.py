"""Gives Alembic the connection and the transaction of `control.database.migrate` to run the steps with."""

from __future__ import annotations

from alembic import context

import control.database.usage_tables  # noqa: F401  (its tables are part of the metadata)
from control.database.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite cannot alter columns
    transactional_ddl=True,
    version_table="schema_version",
)
context.run_migrations()
