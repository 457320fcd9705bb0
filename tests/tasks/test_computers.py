"""Tasks on real computers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sessions.yard import ACCOUNT, Yard, open_yard, prepare_hive, prepare_home, remove
from tests.tasks.conftest import until

from skep.models.models import Models
from skep.models.spec import ModelSpec
from skep.state.hives import Hives
from skep.state.leases import Leases
from skep.tasks.workshop import House, Workshop, open_worker

#: For how long a command sleeps, so that it is known from those of others.
SECONDS = str(10_000_000 + os.getpid())
SCRIPT = """
turns:
 - {when: {role: work, prompt: wait}, call: {tool: run_command, arguments: {command: "echo made>made; sleep SECONDS"}}}
 - {when: {role: work, results: 0}, call: {tool: run_command, arguments: {command: "cat made kept; pwd"}}}
 - {when: {role: work}, call: {tool: finish, arguments: {reply: "{{result}}", confidence: 1}}}
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = prepare_home(tmp_path / "home")
    yield home
    remove(home)


def workshop(yard: Yard, folder: Path) -> Workshop:
    (folder / "script.yaml").write_text(SCRIPT.replace("SECONDS", SECONDS))
    return Workshop(
        database=yard.database,
        log=yard.log,
        hives=Hives(yard.database, yard.log),
        leases=Leases(yard.database),
        sessions=yard.sessions,
        models=Models([ModelSpec("rehearsal", str(folder / "script.yaml"))]),
        host="here",
        household=lambda hive: House(yard.home / "hives" / hive.id),
    )


def sleeping() -> bool:
    return any(f"sleep\0{SECONDS}".encode() in line for line in _command_lines())


def _command_lines() -> Iterator[bytes]:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                yield (process / "cmdline").read_bytes()
            except OSError:
                continue


async def test_cancelling_ends_the_command_that_runs(ready_sqlite_url: str, home: Path, tmp_path: Path) -> None:
    await prepare_hive(ready_sqlite_url)
    async with open_yard(home, ready_sqlite_url) as yard, open_worker(workshop(yard, tmp_path)) as worker:
        task = await worker.tasks.submit(yard.hive, "wait", actor="me")
        await until(sleeping)
        await worker.tasks.cancel(task.id, account_id=ACCOUNT, actor="me")
        task = await worker.tasks.wait(task.id, account_id=ACCOUNT, timeout_s=20)
        await until(lambda: not sleeping())
        assert task.status == "cancelled"


async def test_a_prompt_can_undo_what_the_one_before_it_did(ready_sqlite_url: str, home: Path, tmp_path: Path) -> None:
    await prepare_hive(ready_sqlite_url, same_thread="rollback")
    async with open_yard(home, ready_sqlite_url) as yard, open_worker(workshop(yard, tmp_path)) as worker:
        computer = await yard.resolve()
        await computer.run("echo kept > kept")
        first = await worker.tasks.submit(yard.hive, "wait", actor="me")
        await until(sleeping)
        second = await worker.tasks.submit(yard.hive, "look", actor="me")
        second = await worker.tasks.wait(second.id, account_id=ACCOUNT, timeout_s=60)
        first = await worker.tasks.wait(first.id, account_id=ACCOUNT, timeout_s=60)
        await until(lambda: not sleeping())
    assert (first.status, second.status) == ("cancelled", "succeeded")
    assert "kept" in (second.reply or "") and "made: No such file" in (second.reply or "")
