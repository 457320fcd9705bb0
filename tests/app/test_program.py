"""The program opens whole, closes whole, and notices changed settings in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from skep.app.program import open_program, signing_key
from skep.config import Paths, Settings
from skep.errors import ForeignDatabase, Unavailable
from skep.state.chain import verify
from skep.state.database import Database
from skep.state.events import Noted


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(config=tmp_path / "config.json", home=tmp_path / "home", logs=tmp_path / "log")


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def test_what_was_appended_is_there_signed_at_the_next_opening(paths: Paths) -> None:
    async with open_program(paths, Settings()) as program:
        await program.accounts.create("acme")
        hive = await program.hives.create("garden", account_id="acme", actor="test")
        await program.log.append(Noted(text="hello"), hive_id=hive.id, account_id="acme", actor="test")
    async with open_program(paths, Settings()) as program:
        assert [recorded.event.type for recorded in await program.log.page(hive.id)] == ["hive_created", "noted"]
        verdict = await verify(program.database, signer=program.signer)
        assert (verdict.ok, verdict.unanchored) == (True, 0)


async def test_the_signing_key_is_made_for_its_owner_alone(paths: Paths) -> None:
    async with open_program(paths, Settings()):
        assert signing_key(paths).stat().st_mode & 0o777 == 0o600


async def test_a_changed_file_changes_the_settings_in_effect(paths: Paths) -> None:
    async with open_program(paths, Settings()) as program:
        paths.config.write_text('{"budgets": {"steps_per_task": 7}}')
        await eventually(lambda: program.settings.budgets.steps_per_task == 7)


async def test_state_url_says_where_the_state_is(paths: Paths, tmp_path: Path) -> None:
    async with open_program(paths, Settings(state_url=f"sqlite:///{tmp_path}/other.db")):
        assert (tmp_path / "other.db").exists()


async def test_when_opening_fails_nothing_is_left_running(paths: Paths) -> None:
    paths.home.mkdir()
    (paths.home / "skep.db").write_text("this is no database, but a letter to a friend")
    before = open_files()
    with pytest.raises(ForeignDatabase):
        async with open_program(paths, Settings()):
            pass
    assert len(asyncio.all_tasks()) == 1
    assert open_files() <= before


async def test_a_signing_key_that_cannot_be_made_is_named(paths: Paths) -> None:
    paths.home.mkdir()
    (paths.home / "keys").write_text("a file where the folder belongs")
    with pytest.raises(Unavailable, match=r"keys/events\.pem"):
        async with open_program(paths, Settings()):
            pass


async def test_an_error_inside_still_closes_everything(paths: Paths) -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_program(paths, Settings()) as program:
            await program.accounts.create("acme")
            raise ZeroDivisionError
    assert len(asyncio.all_tasks()) == 1
    reopened = await Database.open(paths.default_state_url, migrate=False)
    await reopened.close()


async def test_each_database_keeps_its_signed_ends_apart(paths: Paths, tmp_path: Path) -> None:
    """A log that is in one database is not missed in another of the same home."""
    other = Settings(state_url=f"sqlite:///{tmp_path / 'other.db'}")
    async with open_program(paths, Settings()) as program:
        await program.accounts.ensure("acme")
        await program.hives.create("garden", account_id="acme", actor="cli:me")
    async with open_program(paths, other) as program:
        assert (await verify(program.database, signer=program.signer)).ok
    async with open_program(paths, Settings()) as program:
        verdict = await verify(program.database, signer=program.signer)
        assert verdict.ok
        assert verdict.unanchored == 0
