"""The database of control, SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
import sqlalchemy as sa
import sqlalchemy.exc
from sqlalchemy.engine import make_url

from control.database.migrate import migrate, migrate_back
from control.database.schema import keys, metadata, organisations, projects, table_state, used_ids
from kvloom_common.database.database import DatabaseInUseError, open_database, with_driver
from kvloom_common.database.opening import MigrationError


def shape(connection: sa.Connection) -> dict[str, object]:
    """What a database has, in comparable form."""
    inspector = sa.inspect(connection)
    return {
        table: (
            {column["name"]: (str(column["type"]), column["nullable"]) for column in inspector.get_columns(table)},
            inspector.get_pk_constraint(table)["constrained_columns"],
            sorted(
                (tuple(key["constrained_columns"]), key["referred_table"]) for key in inspector.get_foreign_keys(table)
            ),
            sorted(tuple(index["column_names"]) for index in inspector.get_indexes(table)),
            sorted(tuple(unique["column_names"]) for unique in inspector.get_unique_constraints(table)),
        )
        for table in sorted(inspector.get_table_names())
    }


async def test_the_steps_lead_to_the_tables_that_the_code_uses_and_back(database_url: str) -> None:
    """A column that the code has and a migration forgot would fail in the field, not in tests of fresh tables."""
    url = with_driver(make_url(database_url))
    async with open_database(url) as database:
        await migrate(database)
        async with database.reading() as connection:
            migrated = await connection.run_sync(shape)
        await migrate_back(database, "base")
        async with database.reading() as connection:
            assert list(await connection.run_sync(shape)) == ["schema_version"]
        async with database.writing() as connection:
            await connection.run_sync(metadata.create_all)
        async with database.reading() as connection:
            made = await connection.run_sync(shape)
        assert {name: migrated[name] for name in made} == made
        async with database.writing() as connection:
            await connection.run_sync(metadata.drop_all)
        await migrate(database)  # and once more from the beginning


async def test_sums_of_usage_survive_the_step_that_adds_their_class_and_the_way_back(database_url: str) -> None:
    """They are what bills are made of. The class of an old request was that of its tier."""
    sums = "1, 2, 3, 4, 5, 6, 7"
    read = "SELECT tier, {} num_requests, cost_nanos FROM usage_daily ORDER BY tier"
    async with open_database(with_driver(make_url(database_url))) as database:
        await migrate(database)
        await migrate_back(database, "r0004")
        async with database.writing() as connection:
            for tier in ("batch", "interactive"):
                row = f"('2026-11-01', 'acme/search', 'k', 'm', '{tier}', {sums})"
                await connection.execute(sa.text(f"INSERT INTO usage_daily VALUES {row}"))
        await migrate(database)
        async with database.writing() as connection:
            rows = (await connection.execute(sa.text(read.format("priority_class,")))).all()
            assert [tuple(row) for row in rows] == [("batch", "batch", 1, 7), ("interactive", "interactive", 1, 7)]
            row = f"('2026-11-01', 'acme/search', 'k', 'm', 'batch', 'gold', {sums})"
            await connection.execute(sa.text(f"INSERT INTO usage_daily VALUES {row}"))
        await migrate_back(database, "r0004")
        async with database.reading() as connection:
            rows = (await connection.execute(sa.text(read.format("")))).all()
            assert [tuple(row) for row in rows] == [("batch", 2, 14), ("interactive", 1, 7)]


async def test_the_step_that_keeps_used_ids_finds_those_of_before(database_url: str) -> None:
    """What was deleted by an older version has usage, too, which nothing else may inherit."""
    audit = "INSERT INTO audit (at, actor, action, target, organisation) VALUES (1, 'x', '{}', '{}', '{}')"
    deleted = (
        ("DeleteOrganisation", "org:old", "old"),
        ("DeleteProject", "tenant:old/search", "old"),
        ("DeleteProject", "tenant:old/search", "old"),
        ("DeleteProject", "tenant:acme/made-again", "acme"),
        ("DeleteUser", "user:ada", ""),
        ("RevokeKey", "key:1", "acme"),
    )
    async with open_database(with_driver(make_url(database_url))) as database:
        await migrate(database, "r0005")
        async with database.writing() as connection:
            for row in deleted:
                await connection.execute(sa.text(audit.format(*row)))
            await connection.execute(
                sa.text("INSERT INTO organisations (id, limits, disabled, created_at) VALUES ('acme', '{}', false, 1)")
            )
            await connection.execute(
                sa.text(
                    "INSERT INTO projects (id, organisation, limits, cache_scope, models, disabled, created_at) "
                    "VALUES ('acme/made-again', 'acme', '{}', '', '[]', false, 1)"
                )
            )
        await migrate(database)
        async with database.reading() as connection:
            found = {tuple(row) for row in await connection.execute(sa.select(used_ids))}
        assert found == {("organisation", "old", "old"), ("tenant", "old/search", "old"), ("user", "ada", "")}
        await migrate_back(database, "r0005")


async def test_a_step_that_fails_leaves_the_database_as_it_was(database_url: str) -> None:
    """A migration that was interrupted, by an error or the end of the process, must not leave half of its steps, which
    neither the old nor the new version could use."""
    async with open_database(with_driver(make_url(database_url))) as database:
        await migrate(database, "r0005")
        async with database.writing() as connection:
            await connection.execute(
                sa.text("CREATE INDEX ix_keys_account ON keys (name)")
            )  # the last step makes it, too
        async with database.reading() as connection:
            before = await connection.run_sync(shape)
        with pytest.raises(sqlalchemy.exc.SQLAlchemyError):
            await migrate(database)
        async with database.reading() as connection:
            assert await connection.run_sync(shape) == before
            assert await connection.scalar(sa.text("SELECT version_num FROM schema_version")) == "r0005"
        async with database.writing() as connection:
            await connection.execute(sa.text("DROP INDEX ix_keys_account"))
        await migrate(database)
        await migrate(database)


async def test_what_was_set_and_used_before_operators_had_settings_of_their_own_survives(database_url: str) -> None:
    """It is not known who has set what there is, so that administrators must not lift it; and an identity has
    spent what it has spent, under the id that has its project."""
    statements = (
        "INSERT INTO organisations (id, limits, disabled, created_at) VALUES ('acme', '{}', false, 0)",
        "INSERT INTO projects (id, organisation, limits, cache_scope, models, disabled, created_at) "
        """VALUES ('acme/x', 'acme', '{"tokens_per_day": 5}', '', '[]', true, 0)""",
        "INSERT INTO keys (id, prefix, project, name, scopes, models, limits, created_at) "
        """VALUES ('cert:a', '', 'acme/x', '', '["usage"]', '["m"]', '{}', 0)""",
        "INSERT INTO budget_spending VALUES ('key:cert:a', 2, '2026-11-01', 7)",
        "INSERT INTO usage_daily VALUES ('2026-11-01', 'shadow:acme/x', 'cert:a', 'm', 't', 'c', 1, 2, 3, 4, 5, 6, 7)",
    )
    accounts = sa.text("SELECT account, key_id FROM budget_spending, usage_daily")
    async with open_database(with_driver(make_url(database_url))) as database:
        await migrate(database)
        await migrate_back(database, "r0005")
        async with database.writing() as connection:
            old_id = await connection.scalar(sa.select(table_state.c.table_id))
            for statement in statements:
                await connection.exec_driver_sql(statement)
        await migrate(database)
        async with database.reading() as connection:
            assert await connection.scalar(sa.select(table_state.c.table_id)) != old_id
            settings = await connection.scalar(sa.select(projects.c.operator_set))
            assert settings == {"limits": {"tokens_per_day": 5}, "disabled": True}
            identity = (await connection.execute(sa.select(keys.c.id, keys.c.operator_set))).one()
            assert tuple(identity) == ("cert:a@acme/x", {"models": ["m"], "scopes": ["usage"]})
            assert tuple((await connection.execute(accounts)).one()) == ("key:cert:a@acme/x", "cert:a@acme/x")
        await migrate_back(database, "r0005")
        async with database.reading() as connection:
            assert tuple((await connection.execute(accounts)).one()) == ("key:cert:a", "cert:a")


async def test_starts_at_the_same_time_migrate_once(database_url: str) -> None:
    """Two processes that start together must not both create the tables."""
    async with open_database(with_driver(make_url(database_url))) as database:
        await asyncio.gather(*(migrate(database) for _ in range(4)))
        async with database.reading() as connection:
            assert len((await connection.execute(sa.select(table_state))).all()) == 1


async def test_a_database_of_a_newer_version_is_refused_with_a_reason(database_url: str) -> None:
    """After a downgrade of the program the operator must learn why it does not start."""
    async with open_database(with_driver(make_url(database_url))) as database:
        await migrate(database)
        async with database.writing() as connection:
            await connection.execute(sa.text("UPDATE schema_version SET version_num = 'r9999'"))
        with pytest.raises(MigrationError, match="newer"):
            await migrate(database)


async def test_no_read_then_update_is_lost(database_url: str) -> None:
    """SQLite with the driver's own BEGIN loses most of them silently."""
    async with open_database(with_driver(make_url(database_url))) as database:
        await migrate(database)

        async def add_one() -> None:
            async with database.writing() as connection:
                version = await connection.scalar(sa.select(table_state.c.version).with_for_update())
                await connection.execute(sa.update(table_state).values(version=(version or 0) + 1))

        await asyncio.gather(*(add_one() for _ in range(50)))
        async with database.reading() as connection:
            assert await connection.scalar(sa.select(table_state.c.version)) == 51


async def test_a_reader_sees_one_state_and_does_not_hold_up_writers(database_url: str) -> None:
    """A snapshot for a router is read in several statements, while administrators make changes."""
    async with open_database(with_driver(make_url(database_url))) as database:
        await migrate(database)
        count = sa.select(sa.func.count()).select_from(organisations)
        async with database.reading() as reader:
            assert await reader.scalar(count) == 0
            async with database.writing() as writer:
                row = {"id": "acme", "limits": {}, "disabled": False, "created_at": 1.0}
                await writer.execute(sa.insert(organisations).values(row))
            assert await reader.scalar(count) == 0
        async with database.reading() as reader:
            assert await reader.scalar(count) == 1


async def test_a_sqlite_database_has_one_owner_and_is_private(tmp_path: Path) -> None:
    """Two services would each answer for half of the budgets' leases; a second one must say so instead."""
    path = tmp_path / "data" / "control.db"
    url = with_driver(make_url(f"sqlite:///{path}"))
    async with open_database(url) as database:
        await migrate(database)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.with_name("control.db-wal").stat().st_mode) == 0o600
        with pytest.raises(DatabaseInUseError, match=r"control\.db"):
            async with open_database(url):
                pass
    async with open_database(url):
        pass


@pytest.mark.parametrize(
    ("url", "message"),
    [("mysql://root@host/db", "neither postgresql nor sqlite"), ("sqlite://", "path of a file")],
)
def test_databases_that_cannot_be_used_are_refused(url: str, message: str) -> None:
    """A wrong URL is a mistake in the configuration, not a stack trace."""
    with pytest.raises(ValueError, match=message):
        with_driver(make_url(url))
