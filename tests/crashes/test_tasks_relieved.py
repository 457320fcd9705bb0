"""Two workers, as if on two machines, on one PostgreSQL: what one leaves, the other finishes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from skep.state.accounts import Accounts
from skep.state.database import Database
from skep.state.hives import Hives
from skep.state.log import EventLog
from skep.tasks.tasks import Tasks

TREE = Path(__file__).parents[2]
DEADLINE_S = 60.0
TASKS = 4

pytestmark = pytest.mark.service


@contextmanager
def worker(url: str, folder: Path, host: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.crashes.task_worker", url, str(folder), host]
    process = subprocess.Popen(command, cwd=TREE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "asleep"])
async def test_a_worker_finishes_what_another_leaves(postgres_url: str, tmp_path: Path, fate: signal.Signals) -> None:
    database = await Database.open(postgres_url)
    log = EventLog(database)
    await Accounts(database).create("bees")
    hive = await Hives(database, log).create("garden", account_id="bees", actor="me")
    tasks, ledger = Tasks(database, log), tmp_path / "ledger"
    (tmp_path / "hold").touch()
    ledger.touch()
    with worker(postgres_url, tmp_path, "one") as first, ExitStack() as later:
        made = [await tasks.submit(hive, f"{n}", thread=f"cli:{n}", actor="me") for n in range(TASKS)]
        await until(lambda: ledger.read_text().count("second") == TASKS)
        later.enter_context(worker(postgres_url, tmp_path, "two"))
        await until((tmp_path / "ready-two").exists)
        made.append(await tasks.submit(hive, "last", thread="cli:last", actor="me"))
        await until(lambda: ledger.read_text().count("second") == TASKS + 1)
        before = ledger.read_text()
        assert all(before.count(task.id) == 2 for task in made), "a worker that lives keeps what it has"
        of_one = {task.id for task in made if f"second {task.id} one" in before}
        assert len(of_one) >= TASKS
        os.kill(first.pid, fate)
        await until(lambda: all(f"second {task} two" in ledger.read_text() for task in of_one))
        (tmp_path / "hold").unlink()
        done = [await tasks.wait(task.id, account_id="bees", timeout_s=DEADLINE_S) for task in made]
        assert {(task.status, task.reply) for task in done} == {("succeeded", "two")}
        if fate == signal.SIGSTOP:
            os.kill(first.pid, signal.SIGCONT)
            await until(lambda: all(f"left {task} one" in ledger.read_text() for task in of_one))
        events = await log.page(hive.id, limit=1000)
    counted = Counter((one.task_id, one.event.type) for one in events if one.task_id)
    for task in made:
        assert counted[task.id, "task_ended"] == counted[task.id, "replied"] == 1
        assert counted[task.id, "noted"] == 2, "each step is on record once"
        assert counted[task.id, "task_started"] == (2 if task.id in of_one else 1)
    firsts = [line for line in ledger.read_text().splitlines() if line.startswith("first")]
    assert len(firsts) == len(made), "a step that is on record is not taken again"
    await log.close()
    await database.close()
