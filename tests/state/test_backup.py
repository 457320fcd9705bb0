from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from skep.errors import (
    Conflict,
    Corrupt,
    DatabaseTooNew,
    ForeignDatabase,
    InvalidRequest,
    Unavailable,
)
from skep.state import revision
from skep.state.accounts import Accounts
from skep.state.backup import backup, restore
from skep.state.database import Database, migrate, status
from skep.state.events import Noted
from skep.state.flags import Flags, Rollouts
from skep.state.hives import Hives
from skep.state.leases import Leases
from skep.state.location import Location
from skep.state.log import EventLog
from skep.state.schema import metadata

TEXTS = ["plain", "שלום \u202e", "nul \0 and \ud7ff", "new\nline \u2028", '"quoted" \\ {"base64": "x"}', "🐝" * 500]


async def _fill(database: Database) -> None:
    log = EventLog(database)
    await Accounts(database).create("bees")
    hives = Hives(database, log)
    hive = await hives.create("home", account_id="bees", actor="me", flags=Flags(skill_authoring_enabled=True))
    notes = [Noted(text=text_) for text_ in TEXTS * 50]
    await log.append_all(notes, hive_id=hive.id, account_id="bees", actor="me", task_id="t-1")
    await hives.create("gone", account_id="bees", actor="me")
    await hives.delete("gone", account_id="bees", actor="me")
    await Rollouts(database).set("sandbox_enabled", 33)
    await Leases(database).acquire("thing", holder="me", ttl_s=0.1)
    await log.close()
    async with database.write() as connection:
        await connection.execute(
            text("INSERT INTO skep_checkpoints VALUES ('h', 1, :hash, '', 'k', :hash)"), {"hash": bytes(range(32))}
        )


async def _content(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    async with database.read() as connection:
        return {
            table.name: sorted(map(tuple, (await connection.execute(select(table))).all()))
            for table in metadata.sorted_tables
        }


@pytest.fixture
async def saved(tmp_path: Path) -> Path:
    """Give a backup of a small database."""
    database = await Database.open(f"sqlite:///{tmp_path / 'saved.db'}")
    await _fill(database)
    await backup(database, tmp_path / "saved.zip")
    await database.close()
    return tmp_path / "saved.zip"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.service)])
def other_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Give a second empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'other.db'}"
    url: str = request.getfixturevalue("another_postgres_url")
    return url


async def test_a_backup_restores_into_either_kind_of_database(
    database: Database, other_url: str, tmp_path: Path
) -> None:
    await _fill(database)
    written = await backup(database, tmp_path / "b.zip")
    assert await restore(other_url, tmp_path / "b.zip") == written
    other = await Database.open(other_url, migrate=False)
    assert await _content(other) == await _content(database)
    assert written.rows == sum(map(len, (await _content(database)).values())) > 300
    await other.close()


async def test_a_restored_database_goes_on_where_the_first_one_stopped(database_url: str, saved: Path) -> None:
    await restore(database_url, saved)
    database = await Database.open(database_url, migrate=False)
    log = EventLog(database)
    (hive,) = await Hives(database, log).list(account_id="bees")
    before = (await log.page(hive.id))[-1]
    after = await log.append(Noted(text="on"), hive_id=hive.id, account_id="bees", actor="me")
    assert after.seq == before.seq + 1 == 303
    lease = await Leases(database).acquire("thing", holder="you", ttl_s=1)
    assert lease and lease.token == 2
    await log.close()
    await database.close()


@pytest.mark.parametrize("change", ["UPDATE skep_events SET actor = 'x'", "DELETE FROM skep_events"])
async def test_a_restored_log_is_append_only(database_url: str, saved: Path, change: str) -> None:
    await restore(database_url, saved)
    database = await Database.open(database_url)
    with pytest.raises(IntegrityError, match="append-only"):
        async with database.write() as connection:
            await connection.execute(text(change))
    await database.close()


async def test_a_backup_holds_one_moment_while_writers_go_on(database: Database, tmp_path: Path) -> None:
    await _fill(database)
    before = await _content(database)
    accounts = Accounts(database)
    loop = asyncio.get_running_loop()
    added: list[asyncio.Task[object]] = []

    def interfere(done: int, _total: int) -> None:
        added.append(loop.create_task(accounts.create(f"late-{done}")))

    await backup(database, tmp_path / "b.zip", progress=interfere)
    await asyncio.gather(*added)
    assert len(added) >= 3
    url = f"sqlite:///{tmp_path / 'restored.db'}"
    await restore(url, tmp_path / "b.zip")
    restored = await Database.open(url)
    assert await _content(restored) == before
    await restored.close()


async def test_progress_comes_to_its_end(database: Database, other_url: str, tmp_path: Path) -> None:
    await _fill(database)
    steps: list[tuple[int, int]] = []
    manifest = await backup(database, tmp_path / "b.zip", progress=lambda *step: steps.append(step))
    assert steps[-1] == (manifest.rows, manifest.rows)
    steps.clear()
    await restore(other_url, tmp_path / "b.zip", progress=lambda *step: steps.append(step))
    assert steps[-1] == (manifest.rows * 3, manifest.rows * 3)
    assert steps == sorted(steps)


async def test_an_existing_file_is_not_replaced(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("dear diary")
    with pytest.raises(Conflict, match="exists already"):
        await backup(database, path)
    assert path.read_text() == "dear diary"


async def test_a_backup_is_its_owners_alone(saved: Path) -> None:
    assert saved.stat().st_mode & 0o777 == 0o600


async def test_a_backup_that_fails_leaves_no_file(database: Database, tmp_path: Path) -> None:
    def fail(_done: int, _total: int) -> None:
        raise ZeroDivisionError

    folder = tmp_path / "backups"
    folder.mkdir()
    await _fill(database)
    with pytest.raises(ZeroDivisionError):
        await backup(database, folder / "b.zip", progress=fail)
    assert list(folder.iterdir()) == []


async def test_a_backup_to_a_folder_that_is_not_there_is_named(database: Database, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file or directory"):
        await backup(database, tmp_path / "nowhere" / "b.zip")


async def test_a_name_that_the_disk_cannot_hold_is_named(sqlite_url: str, saved: Path) -> None:
    database = await Database.open(sqlite_url)
    with pytest.raises(Unavailable, match="File name too long"):
        await backup(database, saved.parent / ("x" * 10_000))
    await database.close()


# --- refusals: nothing is touched


def _not_a_zip(path: Path) -> None:
    path.write_text("dear diary")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _foreign_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("letter.txt", "dear aunt")


def _foreign_manifest(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("manifest.json", '{"format": "tar"}')


@pytest.mark.parametrize("make", [_not_a_zip, _empty, _foreign_zip, _foreign_manifest])
async def test_what_is_no_backup_is_refused(database_url: str, tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "b.zip")
    with pytest.raises(InvalidRequest, match="not a backup"):
        await restore(database_url, tmp_path / "b.zip")
    await _assert_absent(database_url)


async def test_a_backup_that_is_not_there_is_named(sqlite_url: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        await restore(sqlite_url, tmp_path / "b.zip")
    await _assert_absent(sqlite_url)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def _rewritten(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change one member, with checksums of the ZIP that fit."""
    with zipfile.ZipFile(path) as file:
        members = {member: file.read(member) for member in file.namelist()}
    members[name] = change(members[name])
    with zipfile.ZipFile(path, "w") as file:
        for member, content in members.items():
            file.writestr(member, content)


def _changed_row(path: Path) -> None:
    _rewritten(path, "skep_events.jsonl", lambda content: content.replace(b"plain", b"pla1n", 1))


def _dropped_row(path: Path) -> None:
    _rewritten(path, "skep_events.jsonl", lambda content: content[content.index(b"\n") + 1 :])


def _swapped_rows(path: Path) -> None:
    def swap(content: bytes) -> bytes:
        first, second, *rest = content.splitlines(keepends=True)
        return b"".join([second, first, *rest])

    _rewritten(path, "skep_events.jsonl", swap)


def _cut_row(path: Path) -> None:
    _rewritten(path, "skep_events.jsonl", lambda content: content[:-10])


def _odd_row(path: Path) -> None:
    _rewritten(path, "skep_events.jsonl", lambda content: b"[NaN]\n" + content)


def _deep_row(path: Path) -> None:
    _rewritten(path, "skep_events.jsonl", lambda content: b"[" * 100_000 + b"\n" + content)


def _broken_manifest(path: Path) -> None:
    _rewritten(path, "manifest.json", lambda content: content[:50])


def _manifest_of_other_shape(path: Path) -> None:
    _rewritten(path, "manifest.json", lambda content: content.replace(b'"rows"', b'"lines"'))


def _missing_member(path: Path) -> None:
    _rewritten(path, "manifest.json", lambda content: content.replace(b"skep_rollouts", b"skep_elsewhere"))


DAMAGE = [
    _cut,
    _flip,
    _changed_row,
    _dropped_row,
    _swapped_rows,
    _cut_row,
    _odd_row,
    _deep_row,
    _broken_manifest,
    _manifest_of_other_shape,
    _missing_member,
]


@pytest.mark.parametrize("harm", DAMAGE)
async def test_a_damaged_backup_is_refused(sqlite_url: str, saved: Path, harm: Callable[[Path], None]) -> None:
    harm(saved)
    with pytest.raises(Corrupt, match="damaged") as caught:
        await restore(sqlite_url, saved)
    assert caught.value.hint == "use another copy; nothing was changed"
    await _assert_absent(sqlite_url)


async def test_a_backup_of_other_tables_with_fitting_checksums_is_refused(database_url: str, saved: Path) -> None:
    def rename(content: bytes) -> bytes:
        manifest = json.loads(content)
        manifest["tables"][0]["columns"][0] = "other"
        return json.dumps(manifest).encode()

    _rewritten(saved, "manifest.json", rename)
    with pytest.raises(Corrupt, match="does not have the tables"):
        await restore(database_url, saved)
    assert (await status(database_url)).revision is None


async def test_a_backup_of_a_newer_skep_is_refused(sqlite_url: str, saved: Path) -> None:
    _rewritten(saved, "manifest.json", lambda content: content.replace(revision.HEAD.encode(), b"9999"))
    with pytest.raises(DatabaseTooNew):
        await restore(sqlite_url, saved)
    await _assert_absent(sqlite_url)


@pytest.mark.parametrize("percent", [b"333", b'"much"', b'"33"', b"null"])
async def test_a_row_that_breaks_the_schema_undoes_the_restore(database_url: str, saved: Path, percent: bytes) -> None:
    with zipfile.ZipFile(saved) as file:
        manifest = json.loads(file.read("manifest.json"))
        rows = file.read("skep_rollouts.jsonl").replace(b"33", percent)
    entry = next(table for table in manifest["tables"] if table["table"] == "skep_rollouts")
    entry["sha256"] = sha256(rows).hexdigest()
    _rewritten(saved, "skep_rollouts.jsonl", lambda _: rows)
    _rewritten(saved, "manifest.json", lambda _: json.dumps(manifest).encode())
    with pytest.raises(Corrupt, match="skep_rollouts"):
        await restore(database_url, saved)
    assert (await status(database_url)).revision is None


async def test_a_database_that_holds_something_is_refused_and_keeps_it(
    database: Database, ready_url: str, saved: Path
) -> None:
    await Accounts(database).create("mine")
    before = await _content(database)
    with pytest.raises(Conflict, match="skep_accounts has rows"):
        await restore(ready_url, saved)
    assert await _content(database) == before


async def test_an_empty_database_with_the_schema_is_filled(database_url: str, saved: Path) -> None:
    await migrate(database_url)
    assert (await restore(database_url, saved)).rows > 300


async def test_a_foreign_database_is_refused_untouched(tmp_path: Path, saved: Path) -> None:
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(ForeignDatabase):
        await restore(f"sqlite:///{path}", saved)
    assert path.read_bytes() == before


async def test_a_restore_that_is_killed_leaves_an_empty_database(database_url: str, saved: Path) -> None:
    script = (
        "import asyncio, os, pathlib, signal, sys\n"
        "from skep.state.backup import restore\n"
        "def die(done, total):\n"
        "    if done > total * 2 // 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(restore(sys.argv[1], pathlib.Path(sys.argv[2]), progress=die))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, database_url, saved])
    assert done.returncode == -9
    assert (await status(database_url)).revision is None
    await restore(database_url, saved)
    assert (await status(database_url)).current


async def _assert_absent(url: str) -> None:
    """Nothing was made where there was nothing."""
    path = Location.parse(url).path
    assert not path.exists() if path else (await status(url)).revision is None
