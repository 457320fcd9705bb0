from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Table, insert, text
from sqlalchemy.exc import IntegrityError

from skep.errors import StorageFull
from skep.state import migrations, revision
from skep.state.database import Database
from skep.state.hives import Hives
from skep.state.location import Location
from skep.state.log import EventLog
from skep.state.schema import checkpoints, events, metadata
from skep.state.upkeep import USUAL

AT = "2026-01-01T00:00:00.000000Z"
EVENT = {
    "hive_id": "h",
    "seq": 1,
    "account_id": "a",
    "type": "noted",
    "at": AT,
    "actor": "me",
    "record": "{}",
    "hash": bytes(32),
}
CHECKPOINT = {"hive_id": "h", "seq": 1, "hash": bytes(32), "at": "", "key_id": "k", "signature": b"s"}


def test_the_known_revisions_are_those_of_the_scripts() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__path__[0])))
    scripts = ScriptDirectory.from_config(config)
    assert [script.revision for script in scripts.walk_revisions()][::-1] == list(revision.REVISIONS)
    assert scripts.get_current_head() == revision.HEAD


async def test_the_migrated_schema_is_the_one_the_program_uses(database: Database) -> None:
    def differences(connection: Connection) -> list[object]:
        options = {"version_table": revision.VERSION_TABLE, "compare_server_default": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))

    async with database.read() as connection:
        assert await connection.run_sync(differences) == []


async def test_migrating_again_changes_nothing(database: Database) -> None:
    assert await database.migrate() == revision.HEAD


async def test_a_migration_that_fails_leaves_the_database_empty(sqlite_url: str) -> None:
    database = Database(Location.parse(sqlite_url))
    await database.prepare()
    async with database.engine.connect() as connection:
        await connection.execute(text("PRAGMA max_page_count = 5"))
        await connection.rollback()
    with pytest.raises(StorageFull):
        await database.migrate()
    assert await database.revision() is None
    async with database.read() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM sqlite_master"))).scalar_one() == 0
    await database.close()
    healed = await Database.open(sqlite_url)
    await healed.close()


CHANGES = [
    "UPDATE {table} SET hash = hash",
    "DELETE FROM {table}",
    "DELETE FROM {table} WHERE seq = 1",
]


@pytest.mark.parametrize("table", [events, checkpoints], ids=lambda table: table.name)
@pytest.mark.parametrize("change", CHANGES)
async def test_the_log_and_its_checkpoints_are_append_only(database: Database, table: Table, change: str) -> None:
    await _fill(database)
    with pytest.raises(IntegrityError, match=f"{table.name} is append-only"):
        async with database.write() as connection:
            await connection.execute(text(change.format(table=table.name)))
    await _assert_unchanged(database)


@pytest.mark.parametrize("table", [events, checkpoints], ids=lambda table: table.name)
async def test_sqlite_cannot_replace_a_row_of_the_log(sqlite_url: str, table: Table) -> None:
    database = await Database.open(sqlite_url)
    await _fill(database)
    row = EVENT if table is events else CHECKPOINT
    with pytest.raises(IntegrityError, match="append-only"):
        async with database.write() as connection:
            await connection.execute(insert(table).prefix_with("OR REPLACE"), row | {"hash": b"\1" * 32})
    await _assert_unchanged(database)
    await database.close()


@pytest.mark.parametrize(
    "change",
    [
        "TRUNCATE skep_events",
        "TRUNCATE skep_checkpoints",
        "SET LOCAL session_replication_role = replica; DELETE FROM skep_events",
        "INSERT INTO skep_events SELECT * FROM skep_events ON CONFLICT (hive_id, seq) DO UPDATE SET actor = 'x'",
    ],
)
async def test_postgresql_has_no_way_round_the_triggers(postgres_url: str, change: str) -> None:
    database = await Database.open(postgres_url)
    await _fill(database)
    with pytest.raises(IntegrityError, match="append-only"):
        async with database.write() as connection:
            for statement in change.split("; "):
                await connection.execute(text(statement))
    await _assert_unchanged(database)
    await database.close()


async def test_an_event_needs_a_number_from_one_and_a_whole_hash(database: Database) -> None:
    for fault in ({"seq": 0}, {"hash": bytes(31)}):
        with pytest.raises(IntegrityError):
            async with database.write() as connection:
                await connection.execute(insert(events), EVENT | fault)


async def _fill(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(insert(events), EVENT)
        await connection.execute(insert(checkpoints), CHECKPOINT)


async def _assert_unchanged(database: Database) -> None:
    async with database.read() as connection:
        for table, row in ((events, EVENT | {"task_id": None}), (checkpoints, CHECKPOINT)):
            assert [dict(found) for found in (await connection.execute(table.select())).mappings()] == [row]


async def test_hives_of_an_older_schema_keep_their_computers_as_usual(database_url: str) -> None:
    older = Database(Location.parse(database_url))
    await older.prepare()
    async with older.write() as connection:
        await connection.run_sync(partial(revision.upgrade, to="0001"), older.location)
        await connection.execute(text("INSERT INTO skep_accounts (id, created_at) VALUES ('bees', :at)"), {"at": AT})
        await connection.execute(
            text("INSERT INTO skep_hives VALUES ('hv-1', 'bees', 'home', :on, :on, :on, :off, :at, NULL)"),
            {"on": True, "off": False, "at": AT},
        )
    await older.close()
    database = await Database.open(database_url)
    log = EventLog(database)
    assert (await Hives(database, log).show("home", account_id="bees")).upkeep == USUAL
    await log.close()
    await database.close()
