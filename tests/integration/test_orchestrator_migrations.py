"""The orchestrator's tables are those that its migrations make, from an empty database and from a filled one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy.engine import make_url

from kvloom_common.database.database import open_database, with_driver
from kvloom_common.database.opening import migrate, migrate_back
from orchestrator.database.schema import MIGRATIONS, jobs, metadata
from orchestrator.store import objects
from orchestrator.store.objects import StoredObject


def differences(connection: sa.Connection) -> list[object]:
    options = {"version_table": "orchestrator_schema_version", "compare_type": True}
    return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)


async def test_migrations_keep_what_is_stored_and_end_in_the_schema(database_url: str) -> None:
    """A table that only one of the two has is found by the first user of the other database."""
    one = StoredObject("conv_1", 1.0, None, "", "", {"metadata": {"a": "b"}})
    async with open_database(with_driver(make_url(database_url))) as database:
        await migrate(database, MIGRATIONS, "r0001")
        async with database.writing() as connection:
            await objects.add(connection, "acme/search", "conversation", one)
        await migrate(database, MIGRATIONS, "r0003")
        job = {"id": "batch_1", "tenant": "acme/search", "key_id": "k", "created_at": 1.0, "kind": "batch"}
        async with database.writing() as connection:
            await connection.execute(jobs.insert().values(**job, holder="", held_until=0.0))
        for _ in range(2):  # the second time there is nothing to do
            await migrate(database, MIGRATIONS)
        async with database.reading() as connection:
            assert await objects.get(connection, "acme/search", "conversation", "conv_1", 2.0) == one
            assert [row.id for row in await connection.execute(jobs.select())] == ["batch_1"]
            assert await connection.run_sync(differences) == []
        await migrate_back(database, MIGRATIONS, "base")
