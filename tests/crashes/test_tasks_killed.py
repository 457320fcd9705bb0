"""Workers are killed in the middle of whatever they do: every task comes to one end, and nothing is done twice."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.crashes.task_killer import ACCOUNT, PLACES

from skep.state.database import Database
from skep.state.events import Observed, Recorded
from skep.state.hives import Hives
from skep.state.log import EventLog
from skep.tasks.task import Task
from skep.tasks.tasks import Tasks

TREE = Path(__file__).parents[2]


@pytest.mark.timeout(240)
async def test_a_task_survives_the_death_of_its_worker_anywhere(database_url: str, tmp_path: Path) -> None:
    assert _killed(database_url, tmp_path, *PLACES) == len(PLACES)
    tasks, events = await _read(database_url)
    assert len(tasks) == len(PLACES)
    _check_all(tasks, events, tmp_path)


@pytest.mark.whole
@pytest.mark.timeout(1800)
async def test_tasks_survive_sixty_deaths_at_any_time(
    database_url: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if "whole" not in pytestconfig.option.markexpr:
        pytest.skip("it takes minutes; run it with: pytest -m whole")
    assert _killed(database_url, tmp_path, "--random", "60") == 60
    _check_all(*await _read(database_url), tmp_path)


def _killed(url: str, folder: Path, *places: str) -> int:
    Path(folder / "state").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.crashes.task_killer", url, str(folder), *places]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


async def _read(url: str) -> tuple[tuple[Task, ...], list[Recorded]]:
    database = await Database.open(url)
    log = EventLog(database)
    hive = (await Hives(database, log).list(account_id=ACCOUNT))[0]
    tasks = await Tasks(database, log).list(account_id=ACCOUNT, limit=1000)
    events = await log.page(hive.id, limit=10_000)
    await log.close()
    await database.close()
    return tasks, events


def _check_all(tasks: tuple[Task, ...], events: list[Recorded], folder: Path) -> None:
    ledger = Counter((folder / "ledger").read_text().splitlines())
    days = "".join(file.read_text() for file in folder.glob("hives/*/memory/*.md"))
    for task in tasks:
        assert (task.status, task.reply is not None) == ("succeeded", True), task.error
        happened = [one.event for one in events if one.task_id == task.id]
        counted = Counter(event.type for event in happened)
        assert counted.pop("task_started") == task.starts
        assert counted == {
            "prompted": 1,
            "classified": 1,
            "model_called": 4,
            "healed": 1,
            "proposed": 3,
            "ruled": 2,
            "observed": 2,
            "replied": 1,
            "task_ended": 1,
            "afterwards_done": 2,
        }
        assert ledger[f"once {task.id}:2-1"] == ledger[f"once {task.id}:job"] == 1
        assert days.count(f"<!-- {task.id} -->") == 1
        # What does not honour its key was begun at most once; if it was cut off, that is what the worker is told.
        seen = [event.observation["kind"] for event in happened if isinstance(event, Observed)]
        assert seen in (["skill_ran", "command_ended"], ["skill_ran", "interrupted"])
        assert ledger[f"ran {task.id}:3-1"] == 1 or (seen[1] == "interrupted" and not ledger[f"ran {task.id}:3-1"])
