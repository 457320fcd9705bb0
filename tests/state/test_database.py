from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from skep.errors import (
    Corrupt,
    DatabaseBusy,
    DatabaseTooNew,
    ForeignDatabase,
    StorageFull,
    Unavailable,
)
from skep.state.database import Database, migrate, status
from skep.state.failures import translated
from skep.state.leases import Leases
from skep.state.location import Location
from skep.state.revision import HEAD

ADD = text("INSERT INTO skep_accounts (id, created_at) VALUES (:id, '')")
COUNT = text("SELECT count(*) FROM skep_accounts")


async def _count(database: Database) -> int:
    async with database.read() as connection:
        count: int = (await connection.execute(COUNT)).scalar_one()
        return count


# --- reading and writing


async def test_a_write_is_seen_once_its_block_has_ended(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(ADD, {"id": "a"})
        assert await _count(database) == 0
    assert await _count(database) == 1


async def test_a_write_whose_block_raises_leaves_nothing(database: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        async with database.write() as connection:
            await connection.execute(ADD, {"id": "a"})
            raise ZeroDivisionError
    assert await _count(database) == 0


async def test_a_cancelled_write_leaves_nothing_and_the_next_one_works(database: Database) -> None:
    entered = asyncio.Event()

    async def write() -> None:
        async with database.write() as connection:
            await connection.execute(ADD, {"id": "a"})
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(write())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with database.write() as connection:
        await connection.execute(ADD, {"id": "b"})
    assert await _count(database) == 1


async def test_a_read_cannot_write(database: Database) -> None:
    with pytest.raises(Unavailable, match=r"cannot be written|takes no writes"):
        async with database.read() as connection:
            await connection.execute(ADD, {"id": "a"})
    assert await _count(database) == 0


async def test_a_read_sees_one_moment(database: Database) -> None:
    async with database.read() as connection:
        assert (await connection.execute(COUNT)).scalar_one() == 0
        async with database.write() as writer:
            await writer.execute(ADD, {"id": "a"})
        assert (await connection.execute(COUNT)).scalar_one() == 0
    assert await _count(database) == 1


async def test_many_writers_at_once_all_succeed(database: Database) -> None:
    async def add(number: int) -> None:
        async with database.write() as connection:
            await connection.execute(ADD, {"id": f"a{number}"})

    await asyncio.gather(*(add(number) for number in range(40)))
    assert await _count(database) == 40


async def test_a_broken_constraint_is_left_for_the_caller_to_name(database: Database) -> None:
    with pytest.raises(IntegrityError):
        async with database.write() as connection:
            await connection.execute(ADD, {"id": "a"})
            await connection.execute(ADD, {"id": "a"})


async def test_closing_twice_is_harmless(database: Database) -> None:
    await database.close()
    await database.close()


async def test_sqlite_is_set_up_for_durability(sqlite_url: str) -> None:
    database = await Database.open(sqlite_url)
    async with database.write() as connection:
        found = [
            (await connection.execute(text(f"PRAGMA {name}"))).scalar_one()
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        ]
    await database.close()
    assert found == ["wal", 2, 5000, 1]


async def test_a_new_sqlite_file_is_its_owners_alone(sqlite_url: str) -> None:
    await migrate(sqlite_url)
    path = Location.parse(sqlite_url).path
    assert path and (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


async def test_postgresql_keeps_everything_in_its_own_schema(postgres_url: str) -> None:
    database = await Database.open(postgres_url)
    async with database.read() as connection:
        rows = await connection.execute(text("SELECT DISTINCT schemaname FROM pg_tables WHERE tablename LIKE 'skep%'"))
        assert rows.scalars().all() == ["skep"]
    await database.close()


async def test_what_the_url_asks_of_postgresql_is_kept(postgres_url: str) -> None:
    database = await Database.open(f"{postgres_url}&application_name=mine&options=-c%20statement_timeout%3D7s")
    async with database.read() as connection:
        shown = [
            (await connection.execute(text(f"SHOW {name}"))).scalar_one()
            for name in ("application_name", "statement_timeout", "search_path")
        ]
    await database.close()
    assert shown == ["mine", "7s", "skep"]


# --- opening what is there already


async def test_opening_again_finds_what_was_written(database_url: str) -> None:
    first = await Database.open(database_url)
    async with first.write() as connection:
        await connection.execute(ADD, {"id": "a"})
    await first.close()
    second = await Database.open(database_url, migrate=False)
    assert await _count(second) == 1
    await second.close()


async def test_without_leave_to_migrate_an_empty_database_is_refused_and_stays_so(
    database_url: str,
) -> None:
    with pytest.raises(Unavailable, match=f"needs {HEAD}") as caught:
        await Database.open(database_url, migrate=False)
    assert caught.value.hint == "run: skep state migrate"
    assert (await status(database_url)).revision is None
    path = Location.parse(database_url).path
    assert path is None or not path.parent.exists()


async def test_status_tells_the_revision_before_and_after_migrating(database_url: str) -> None:
    before = await migrate(database_url)
    after = await status(database_url)
    assert (before.revision, before.current) == (None, False)
    assert (after.revision, after.current, after.head) == (HEAD, True, HEAD)


async def test_a_newer_database_is_refused_untouched(database_url: str) -> None:
    database = await Database.open(database_url)
    async with database.write() as connection:
        await connection.execute(text("UPDATE skep_alembic_version SET version_num = '9999'"))
    await database.close()
    for attempt in (Database.open(database_url), status(database_url), migrate(database_url)):
        with pytest.raises(DatabaseTooNew, match="9999"):
            await attempt
    database = Database(Location.parse(database_url))
    async with database.read() as connection:
        stored = (await connection.execute(text("SELECT version_num FROM skep_alembic_version"))).scalars().all()
    await database.close()
    assert stored == ["9999"]


def _other_sqlite(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
        connection.execute("PRAGMA journal_mode = WAL")


def _other_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA application_id = 252006673")
        connection.execute("CREATE TABLE skep_alembic_version (version_num)")


def _text(path: Path) -> None:
    path.write_text("dear diary")


@pytest.mark.parametrize("make", [_other_sqlite, _other_program, _text])
async def test_a_foreign_file_is_refused_untouched(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "theirs.db"
    make(path)
    before = path.read_bytes(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir())
    for attempt in (
        Database.open(f"sqlite:///{path}"),
        status(f"sqlite:///{path}"),
        migrate(f"sqlite:///{path}"),
    ):
        with pytest.raises(ForeignDatabase) as caught:
            await attempt
        assert str(path) in caught.value.message and caught.value.hint
    assert (path.read_bytes(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir())) == before


async def test_a_schema_of_another_program_is_refused_untouched(postgres_url: str) -> None:
    await _on_server(postgres_url, "CREATE SCHEMA skep; CREATE TABLE skep.skep_alembic_version (version_num text)")
    with pytest.raises(ForeignDatabase, match="schema skep"):
        await Database.open(postgres_url)
    rows = await _on_server(postgres_url, "SELECT relname FROM pg_class WHERE relnamespace = 'skep'::regnamespace")
    assert rows == [("skep_alembic_version",)]


@pytest.fixture
async def role(postgres_url: str) -> AsyncIterator[str]:
    """Give a role that may log in and do nothing else."""
    name = f"bee_{uuid.uuid4().hex}"
    await _on_server(postgres_url, f"CREATE ROLE {name} LOGIN")
    yield name
    await _on_server(postgres_url, f"DROP OWNED BY {name}; DROP ROLE {name}")


async def test_a_role_that_may_not_create_schemas_uses_the_one_made_for_it(postgres_url: str, role: str) -> None:
    table = "CREATE TABLE public.theirs (x int)"
    await _on_server(postgres_url, f"CREATE SCHEMA skep AUTHORIZATION {role}; {table}")
    database = await Database.open(postgres_url.replace("postgres@", f"{role}@"))
    assert await _count(database) == 0
    await database.close()


async def _on_server(url: str, statements: str) -> list[tuple[object, ...]]:
    import psycopg

    async with await psycopg.AsyncConnection.connect(url) as connection:
        cursor = await connection.execute(statements.encode())
        return await cursor.fetchall() if cursor.description else []


OPEN = textwrap.dedent("""
    import asyncio, sys
    from skep.state.database import Database

    async def main():
        await (await Database.open(sys.argv[1])).close()

    asyncio.run(main())
    print("alembic" in sys.modules)
""")


def test_processes_that_open_a_new_database_at_once_all_succeed(database_url: str) -> None:
    command = [sys.executable, "-c", OPEN, database_url]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(6)]
    assert [(process.communicate()[1], process.returncode) for process in processes] == [("", 0)] * 6


def test_opening_a_current_database_does_not_load_alembic(database_url: str) -> None:
    command = [sys.executable, "-c", OPEN, database_url]
    answers = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert answers == ["True\n", "False\n"]


# --- failures


async def test_a_database_locked_by_another_process_is_busy_and_then_works(sqlite_url: str) -> None:
    database = await Database.open(sqlite_url)
    path = Location.parse(sqlite_url).path
    hold = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "c.execute('BEGIN IMMEDIATE'); print('held', flush=True); sys.stdin.read(); c.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(DatabaseBusy) as caught:
            async with database.write() as connection:
                await connection.execute(ADD, {"id": "b"})
        assert str(path) in caught.value.message
        assert await _count(database) == 0
        holder.communicate("")
    async with database.write() as connection:
        await connection.execute(ADD, {"id": "a"})
    assert await _count(database) == 1
    await database.close()


async def test_a_row_locked_by_another_transaction_is_busy(postgres_url: str) -> None:
    database = await Database.open(f"{postgres_url}&options=-c%20lock_timeout%3D50ms")
    async with database.write() as connection:
        await connection.execute(ADD, {"id": "a"})
    async with database.write() as connection:
        await connection.execute(text("UPDATE skep_accounts SET deleted_at = ''"))
        with pytest.raises(DatabaseBusy):
            async with database.write() as other:
                await other.execute(text("UPDATE skep_accounts SET deleted_at = ''"))
    await database.close()


async def test_a_full_disk_is_named_and_what_was_written_stays(sqlite_url: str) -> None:
    database = await Database.open(sqlite_url)
    async with database.write() as connection:
        await connection.execute(ADD, {"id": "a"})
        pages = (await connection.execute(text("PRAGMA page_count"))).scalar_one()
        await connection.execute(text(f"PRAGMA max_page_count = {pages}"))
    with pytest.raises(StorageFull) as caught:
        async with database.write() as connection:
            await connection.execute(ADD, {"id": "b" * 100_000})
    assert caught.value.hint
    async with database.write() as connection:
        await connection.execute(text("PRAGMA max_page_count = 1000000"))
        await connection.execute(ADD, {"id": "b" * 100_000})
    assert await _count(database) == 2
    await database.close()


async def test_a_damaged_file_is_named_corrupt(sqlite_url: str) -> None:
    await migrate(sqlite_url)
    path = Location.parse(sqlite_url).path
    assert path
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    with pytest.raises(Corrupt, match="damaged") as caught:
        await Database.open(sqlite_url)
    assert "backup" in (caught.value.hint or "")


AS_USER = textwrap.dedent("""
    import asyncio, os, sys, tempfile
    from sqlalchemy import text
    from skep.errors import SkepError
    from skep.state.database import Database

    async def use(path):
        try:
            database = await Database.open(f"sqlite:///{path}")
            async with database.write() as connection:
                await connection.execute(text("INSERT INTO skep_accounts (id, created_at) VALUES ('b', '')"))
            await database.close()
            return "fine"
        except SkepError as error:
            return f"{type(error).__name__} {error.message} | {error.hint}"

    # Everything is imported before the change of user, who may be unable to read this interpreter.
    with tempfile.TemporaryDirectory() as folder:
        assert asyncio.run(use(f"{folder}/skep.db")) == "fine"
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    print(asyncio.run(use(sys.argv[1])))
""")


def _as_ordinary_user(path: Path) -> str:
    """Use a database as somebody whom permissions bind: root would pass them all."""
    done = subprocess.run([sys.executable, "-c", AS_USER, path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Path]:
    """Give a folder that an ordinary user can reach; pytest's own are root's alone."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.stat().st_uid == os.geteuid() and "pytest" in folder.name:
            folder.chmod(0o755)
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    yield shelf
    shelf.chmod(0o755)


async def test_a_read_only_folder_is_named_with_what_to_do(shelf: Path) -> None:
    path = shelf / "skep.db"
    await migrate(f"sqlite:///{path}")
    path.chmod(0o444)
    shelf.chmod(0o555)
    answer = _as_ordinary_user(path)
    assert answer.startswith(f"Unavailable {path} cannot be ")
    assert "folder" in answer.partition("|")[2]


def test_a_folder_that_may_not_be_made_is_named(shelf: Path) -> None:
    shelf.chmod(0o555)
    answer = _as_ordinary_user(shelf / "new" / "skep.db")
    assert answer.startswith(f"Unavailable {shelf / 'new' / 'skep.db'} cannot be opened: Permission denied")


async def test_a_file_where_a_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot be opened: Not a directory"):
        await Database.open(f"sqlite:///{tmp_path / 'file' / 'skep.db'}")


async def test_a_folder_where_the_file_should_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be opened: Is a directory"):
        await Database.open(f"sqlite:///{tmp_path}")


async def test_a_server_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        await Database.open(f"postgresql://bee:secret@/hive?host={tmp_path}")
    assert "secret" not in caught.value.message and "check that the server runs" in (caught.value.hint or "")


async def test_a_database_that_is_not_on_the_server_is_named(postgres_server: str) -> None:
    with pytest.raises(Unavailable, match="nowhere"):
        await Database.open(postgres_server.replace("/postgres?", "/nowhere?"))


async def test_a_connection_cut_by_the_server_is_named_and_the_next_one_works(postgres_url: str) -> None:
    database = await Database.open(postgres_url)
    with pytest.raises(Unavailable):
        async with database.write() as connection:
            pid = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
            await _on_server(postgres_url, f"SELECT pg_terminate_backend({pid}, 5000)")
            await connection.execute(COUNT)
    assert await _count(database) == 0
    await database.close()


async def test_a_role_without_rights_is_told_what_it_needs(postgres_url: str, role: str) -> None:
    await migrate(postgres_url)
    with pytest.raises(Unavailable, match="may not") as caught:
        await Database.open(postgres_url.replace("postgres@", f"{role}@"))
    assert "schema skep" in (caught.value.hint or "")


async def test_a_missing_driver_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(Unavailable, match="driver is not installed") as caught:
        await Database.open("postgresql://bee@host/hive")
    assert caught.value.hint == "pip install 'skep[postgres]'"


async def test_a_path_that_the_disk_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="File name too long"):
        await Database.open(f"sqlite:///{tmp_path}/{'x' * 10_000}")


def test_an_error_of_no_known_kind_passes_as_it_is() -> None:
    error = sqlite3.OperationalError("near SELEKT")
    with pytest.raises(sqlite3.OperationalError, match="SELEKT"), translated("here"):
        raise error


async def test_a_write_that_is_cancelled_at_any_moment_leaves_the_database_to_others(database_url: str) -> None:
    chance = random.Random(2026)
    one, other = await Database.open(database_url), await Database.open(database_url)
    kept: list[asyncio.Task[object]] = []  # with all that the last steps of each have in hand
    try:
        for number in range(150):
            lease = Leases(one).acquire(f"one-{number}", holder="one", ttl_s=60)
            kept.append(asyncio.ensure_future(lease))
            await asyncio.sleep(chance.uniform(0, 0.004))
            kept[-1].cancel()
            await asyncio.wait(kept)
            async with asyncio.timeout(4):
                assert await Leases(other).acquire(f"other-{number}", holder="other", ttl_s=60) is not None
    finally:
        await one.close()
        await other.close()
