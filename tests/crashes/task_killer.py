"""Carry tasks in processes that are killed: at named places, or whenever, and see the rest done by the next.

    python -m tests.crashes.task_killer URL FOLDER PLACE…       one task for each place, killed there
    python -m tests.crashes.task_killer URL FOLDER --random N   N kills at times that a seed decides

Everything is loaded once, and each worker is a fork of that. Effects on the world go to FOLDER/ledger, a file that no
part of Skep looks at: `once KEY` by a tool that honours its key, `ran KEY` by one that does not, and each time.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# Loaded before the forks, each of which would have to otherwise.
import aiosqlite  # noqa: F401
import dbos  # noqa: F401
import psycopg  # noqa: F401
import sqlalchemy.dialects.postgresql.psycopg
import sqlalchemy.dialects.sqlite.aiosqlite  # noqa: F401
from pydantic_ai.messages import ModelMessage  # noqa: F401

from skep.agent.actions import RunCommand, UseSkill
from skep.agent.desk import Desk
from skep.agent.observations import CommandEnded, Observation, SkillRan
from skep.agent.tool import Tool
from skep.agent.toolbox import Toolbox
from skep.errors import SandboxDisabled
from skep.models import hearing, output, rehearsal  # noqa: F401
from skep.models.exchange import Answer, Request
from skep.models.models import Models
from skep.models.spec import ModelSpec
from skep.sessions.computer import Computer
from skep.state.accounts import Accounts
from skep.state.database import Database
from skep.state.hives import Hive, Hives
from skep.state.leases import Leases
from skep.state.log import EventLog
from skep.tasks import acting, engine, supervise  # noqa: F401
from skep.tasks.engine import Pace
from skep.tasks.task import Task
from skep.tasks.tasks import Tasks
from skep.tasks.workshop import House, Workshop, open_worker

ACCOUNT = "bees"
#: The places at which a worker can be killed, in the order in which a task comes to them.
PLACES = (
    "model-asked",
    "model-answered",
    "waiting",
    "ruled",
    "tool-begun",
    "tool-done",
    "command-done",
    "reply",
    "ended",
    "job-begun",
    "job-done",
)
SCRIPT = """\
turns:
  - when: {role: classify}
    value: {kind: one, why: it is to be done}
  - when: {role: work, results: 0}
    fail: 429
    times: 1
    retry_after_s: 0.3
  - when: {role: work, results: 0}
    call: {tool: use_skill, arguments: {skill: hive/post, script: post}}
  - when: {role: work, results: 1}
    call: {tool: run_command, arguments: {command: post}}
  - when: {role: work}
    call: {tool: finish, arguments: {reply: "done: {{result}}", confidence: 0.9}}
"""


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Killer:
    """Kills this process when it comes to a place for the given task."""

    def __init__(self, place: str = "") -> None:
        self._place = place

    def at(self, place: str) -> None:
        if place == self._place:
            die()


class Ledger:
    """A file on which the world keeps what was done to it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, line: str, *, once: bool) -> None:
        with self._file.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not once or line not in file.read().splitlines():
                file.write(f"{line}\n")


class Nowhere:
    """Has no computer for anybody."""

    async def resolve(self, hive: Hive, thread: str, *, account_id: str) -> Computer:
        raise SandboxDisabled("there is no sandbox here", hint="do without")


class FragileModels(Models):
    """Models whose worker may die before they answer, or right after."""

    def __init__(self, script: Path, killer: Killer) -> None:
        super().__init__([ModelSpec("rehearsal", str(script))])
        self._killer = killer

    async def ask(self, request: Request) -> Answer:
        if request.role == "work":
            self._killer.at("model-asked")
        answer = await super().ask(request)
        if request.role == "work":
            self._killer.at("model-answered")
        return answer


def tools(killer: Killer, ledger: Ledger) -> Toolbox:
    async def post(action: UseSkill, desk: Desk) -> Observation:
        killer.at("tool-begun")
        ledger.write(f"once {action.stamp.key}", once=True)
        killer.at("tool-done")
        return SkillRan(stamp=action.stamp, skill=action.skill, exit_code=0, status=200)

    async def run(action: RunCommand, desk: Desk) -> Observation:
        ledger.write(f"ran {action.stamp.key}", once=False)
        killer.at("command-done")
        return CommandEnded(stamp=action.stamp, exit_code=0, stdout="ran")

    made = (Tool(UseSkill, post, repeatable=True), Tool(RunCommand, run), *_finish())
    return _Ruled(made, killer)


def _finish() -> tuple[Tool, ...]:
    from skep.agent.tools import talk

    return talk.TOOLS


class _Ruled(Toolbox):
    def __init__(self, made: tuple[Tool, ...], killer: Killer) -> None:
        super().__init__(made)
        self._killer = killer

    def asked(self, action: Any) -> Any:
        self._killer.at("ruled")
        return super().asked(action)


async def watch(log: EventLog, hive: Hive, killer: Killer) -> None:
    """Die while a worker waits, when a reply is being written, and when a task has just ended."""
    places = {"healed": "waiting", "replied": "reply", "task_ended": "ended"}
    newest = await log.page(hive.id, limit=10_000)
    async for one in log.follow(hive.id, after=newest[-1].seq if newest else 0, types=tuple(places)):
        killer.at(places[one.event.type])


async def carry(url: str, folder: Path, place: str, *, until: Callable[[tuple[Task, ...]], bool]) -> None:
    """Work on whatever is there until that is so."""
    killer, ledger = Killer(place), Ledger(folder / "ledger")
    database = await Database.open(url)
    log = EventLog(database)
    hive = (await Hives(database, log).list(account_id=ACCOUNT))[0]

    async def job(task: Task, hive: Hive) -> None:
        killer.at("job-begun")
        ledger.write(f"once {task.id}:job", once=True)
        killer.at("job-done")

    workshop = Workshop(
        database=database,
        log=log,
        hives=Hives(database, log),
        leases=Leases(database),
        sessions=Nowhere(),
        models=FragileModels(folder / "script.yaml", killer),
        host="here",
        household=lambda hive: House(folder / "hives" / hive.id),
        pace=Pace(concurrent_per_account=4),
        jobs={"job": job},
        toolbox=lambda _: tools(killer, ledger),
    )
    watching = asyncio.create_task(watch(log, hive, killer))
    async with open_worker(workshop) as worker:
        while not until(await worker.tasks.list(account_id=ACCOUNT, limit=1000)) or not await _followed_up(log, hive):
            await asyncio.sleep(0.02)
    watching.cancel()
    await asyncio.wait([watching])
    await log.close()
    await database.close()


async def _followed_up(log: EventLog, hive: Hive) -> bool:
    done = await log.page(hive.id, types=("afterwards_done",), limit=10_000)
    ended = await log.page(hive.id, types=("task_ended",), limit=10_000)
    return len(done) == 2 * len(ended)


async def prepare(url: str, folder: Path) -> None:
    (folder / "script.yaml").write_text(SCRIPT)
    (folder / "ledger").touch()
    database = await Database.open(url)
    log = EventLog(database)
    await Accounts(database).create(ACCOUNT)
    await Hives(database, log).create("garden", account_id=ACCOUNT, actor="me")
    await log.close()
    await database.close()


async def submit(url: str, prompt: str) -> None:
    database = await Database.open(url)
    log = EventLog(database)
    hive = (await Hives(database, log).list(account_id=ACCOUNT))[0]
    await Tasks(database, log).submit(hive, prompt, thread=f"cli:{prompt}", actor="me")
    await log.close()
    await database.close()


def forked(work: Callable[[], None], *, kill_after_s: float | None = None) -> int:
    """Do something in a fork; return the signal that ended it, or 0."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    if kill_after_s is not None:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, kill_after_s)
    _, status = os.waitpid(pid, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        sys.exit(f"a worker failed with {os.WEXITSTATUS(status)}")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def all_ended(tasks: tuple[Task, ...]) -> bool:
    return all(task.ended for task in tasks)


def at_places(url: str, folder: Path, places: list[str]) -> int:
    killed = 0
    for number, place in enumerate(places):
        forked(lambda number=number: asyncio.run(submit(url, f"{number}")))  # type: ignore[misc]
        ended = forked(lambda place=place: asyncio.run(carry(url, folder, place, until=all_ended)))  # type: ignore[misc]
        killed += ended == signal.SIGKILL
    return killed


def at_random(url: str, folder: Path, kills: int, seed: int = 7) -> int:
    chance, killed, number = random.Random(seed), 0, 0
    while killed < kills:
        for _ in range(3):
            forked(lambda number=number: asyncio.run(submit(url, f"{number}")))  # type: ignore[misc]
            number += 1
        work = lambda: asyncio.run(carry(url, folder, "", until=all_ended))  # noqa: E731
        killed += forked(work, kill_after_s=chance.uniform(0.05, 1.5)) == signal.SIGKILL
    return killed


def main() -> None:
    url, folder, rest = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    forked(lambda: asyncio.run(prepare(url, folder)))
    killed = at_random(url, folder, int(rest[1])) if rest[0] == "--random" else at_places(url, folder, rest)
    forked(lambda: asyncio.run(carry(url, folder, "", until=all_ended)))
    print(killed)


if __name__ == "__main__":
    main()
