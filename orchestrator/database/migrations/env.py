"""Gives Alembic the connection and the transaction of kvloom_common/database/opening.py to run the steps with."""

from __future__ import annotations

from alembic import context

from orchestrator.database.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite cannot alter columns
    transactional_ddl=True,
    version_table="orchestrator_schema_version",  # control may have the same PostgreSQL database
)
context.run_migrations()
