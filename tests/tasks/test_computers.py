"""Tasks on real computers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sessions.yard import ACCOUNT, Yard, open_yard, prepare_hive, prepare_home, remove
from tests.tasks.conftest import until
from tests.tasks.shop import workshop_at

from skep.models.models import Models
from skep.models.spec import ModelSpec
from skep.tasks.workshop import Workshop, open_worker

#: For how long commands sleep, so that they are known from those of others: what runs, what is left, and what is left
#: by somebody who has cleared the mark of the task from its environment.
SECONDS, LEFT, UNMARKED = (str(times * 10_000_000 + os.getpid()) for times in (1, 2, 3))
LEAVE = """
    nohup sleep LEFT >/dev/null 2>&1 & setsid sleep LEFT >/dev/null 2>&1 &
    unset SKEP_IDEMPOTENCY_KEY; nohup sleep UNMARKED >/dev/null 2>&1 & setsid sleep UNMARKED >/dev/null 2>&1 &
""".strip().replace("\n", " ")
CODE = "import subprocess; subprocess.Popen(['sleep', 'LEFT'], start_new_session=True)"
STUBBORN = """while True:
  try: subprocess.run(['sleep', 'SECONDS'])
  except KeyboardInterrupt: pass""".replace("\n", "\\n")
SCRIPT = """
turns:
 - {when: {role: work, prompt: wait}, call: {tool: run_command, arguments: {command: "echo made>made; sleep SECONDS"}}}
 - {when: {role: work, prompt: leave, results: 0}, call: {tool: run_command, arguments: {command: "LEAVE"}}}
 - {when: {role: work, prompt: leave, results: 1}, call: {tool: run_python, arguments: {code: "CODE"}}}
 - {when: {role: work, prompt: leave}, call: {tool: run_python, arguments: {code: "STUBBORN"}}}
 - {when: {role: work, results: 0}, call: {tool: run_command, arguments: {command: "cat made kept; pwd"}}}
 - {when: {role: work}, call: {tool: finish, arguments: {reply: "{{result}}", confidence: 1}}}
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = prepare_home(tmp_path / "home")
    yield home
    remove(home)


def workshop(yard: Yard, folder: Path) -> Workshop:
    script = SCRIPT.replace("LEAVE", LEAVE).replace("CODE", CODE).replace("STUBBORN", STUBBORN)
    for name, seconds in (("SECONDS", SECONDS), ("LEFT", LEFT), ("UNMARKED", UNMARKED)):
        script = script.replace(name, seconds)
    (folder / "script.yaml").write_text(script)
    return workshop_at(yard, Models([ModelSpec("rehearsal", str(folder / "script.yaml"))]))


def sleepers(seconds: str) -> int:
    return sum(line == f"sleep\0{seconds}\0".encode() for line in _command_lines())


def sleeping() -> bool:
    return sleepers(SECONDS) > 0


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


async def test_cancelling_ends_what_the_task_has_detached_and_code_that_does_not_stop(
    ready_sqlite_url: str, home: Path, tmp_path: Path
) -> None:
    await prepare_hive(ready_sqlite_url)
    async with open_yard(home, ready_sqlite_url) as yard, open_worker(workshop(yard, tmp_path)) as worker:
        task = await worker.tasks.submit(yard.hive, "leave", actor="me")
        await until(lambda: sleeping() and (sleepers(LEFT), sleepers(UNMARKED)) == (3, 2))
        await worker.tasks.cancel(task.id, account_id=ACCOUNT, actor="me")
        await worker.tasks.wait(task.id, account_id=ACCOUNT, timeout_s=20)
        await until(lambda: not sleeping() and sleepers(LEFT) == 0)
        assert sleepers(UNMARKED) == 2, "without the mark nothing tells that it is the task's"


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
