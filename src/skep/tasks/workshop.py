"""What a worker works with, and how a task is carried with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from skep.errors import SkepError
from skep.governance.ruling import Policy
from skep.healing.breaker import Breakers
from skep.sessions.sessions import Sessions
from skep.state.database import Database
from skep.state.events import FailureNoted
from skep.state.flags import Flags
from skep.state.hives import Hive, Hives
from skep.state.leases import Leases
from skep.state.log import EventLog
from skep.tasks.afterwards import Job
from skep.tasks.agreement import Agreement, Bounds
from skep.tasks.brief import queen_instructions, read_failures, read_history, read_memory, worker_instructions
from skep.tasks.engine import Pace
from skep.tasks.ledger import Ledger
from skep.tasks.meter import Meter
from skep.tasks.queen import Queen
from skep.tasks.question import Questions
from skep.tasks.rewind import Checkpoints, Rewind, Undo, find_undo
from skep.tasks.run import Outcome, Run
from skep.tasks.task import Task
from skep.tasks.thinking import Thinker
from skep.tasks.trajectory import append_trajectory
from skep.tasks.worker import Worker, run_worker

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelMessage

    from skep.agent.desk import Desk
    from skep.agent.toolbox import Toolbox
    from skep.models.models import Models
    from skep.sessions.computer import Computer
    from skep.workspace.snapshot.indexes import Ecosystem


class Reception(Protocol):
    """Where the computer of a thread is found; `Sessions` is one."""

    async def resolve(self, hive: Hive, thread: str, *, account_id: str) -> Computer: ...


@dataclass(frozen=True, slots=True)
class House:
    """The folders of a hive on this machine: its own, and the shelves of skills by their names."""

    folder: Path
    skills: Mapping[str, Path] = field(default_factory=dict)


async def as_set(hive: Hive) -> Flags:
    """Take the flags of a hive as they are set."""
    return hive.flags


def none_listed(_: Hive) -> frozenset[Ecosystem]:
    """Take no packages for allowed."""
    return frozenset()


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a worker works with, put together by the program.

    `host` is what this machine is called, `flags` says which flags of a hive are in effect, `network` whether its
    sandboxes may reach out, `listed` which packages come to it from hosts on a list, `confidence` is the least
    with which an answer is taken as it is, and `jobs` are done when a task has ended. `command_timeout_s` is for
    commands and code that do not ask for a time of their own. `breakers` should be those that `models` asks too.
    """

    database: Database
    log: EventLog
    hives: Hives
    leases: Leases
    sessions: Reception
    models: Models
    host: str
    household: Callable[[Hive], House]
    pace: Pace = field(default_factory=Pace)
    bounds: Bounds = field(default_factory=Bounds)
    usd_per_day: float | None = None
    confidence: float = 0.5
    approval_timeout_s: float = 3600.0
    command_timeout_s: float = 30.0
    network: bool = False
    listed: Callable[[Hive], frozenset[Ecosystem]] = none_listed
    policy: Policy = field(default_factory=Policy)
    flags: Callable[[Hive], Awaitable[Flags]] = as_set
    breakers: Breakers = field(default_factory=Breakers)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    #: The tools of a hive's workers, where they are not the usual ones.
    toolbox: Callable[[Hive], Toolbox] | None = None
    #: For workspaces that another process holds, where a prompt is to undo what the one before it did.
    checkpoints: Checkpoints | None = None


@dataclass(frozen=True, slots=True)
class _Matter:
    """One task with what is gathered about it."""

    run: Run
    agreement: Agreement
    thinker: Thinker
    meter: Meter
    house: House
    memory: str
    failures: Sequence[FailureNoted]
    history: Sequence[ModelMessage]


class _Bench:
    """The workshop at work on one task after another."""

    def __init__(self, workshop: Workshop) -> None:
        self._shop = workshop
        self._ledger = Ledger(workshop.database, workshop.log)
        shop = workshop
        self._rewind = Rewind(shop.sessions, shop.checkpoints) if isinstance(shop.sessions, Sessions) else None
        self.wake: Callable[[], None] = lambda: None

    async def carry(self, run: Run) -> Outcome:
        """Carry a task: the queen those that a person asked for, a worker those of a plan."""
        matter = await self._gather(run)
        work = partial(self._work, matter)
        if not matter.agreement.queen:
            return await work()
        if self._rewind is not None and matter.agreement.keeps:
            await self._rewind.prepare(run, matter.agreement)
        options = matter.agreement.options
        queen = Queen(run, self._ledger, matter.thinker, matter.meter, options=options, wake=self.wake)
        return await queen.answer(queen_instructions(run.hive, matter.memory), matter.history, work)

    async def _gather(self, run: Run) -> _Matter:
        flags, house = await self._shop.flags(run.hive), self._shop.household(run.hive)
        agreement = await self._agreement(run, flags)
        meter = Meter(agreement.bounds)
        return _Matter(
            run,
            agreement,
            Thinker(run, self._shop.models, self._shop.breakers, meter, heals=agreement.healing),
            meter,
            house,
            await asyncio.to_thread(read_memory, house.folder) if flags.file_memory_enabled else "",
            await read_failures(self._ledger, run.hive) if flags.file_memory_enabled else (),
            await read_history(self._ledger, run.task) if agreement.queen else (),
        )

    async def _agreement(self, run: Run, flags: Flags) -> Agreement:
        """Return what the task was begun on; if that is now, put it on record before anything depends on it."""
        if run.task.agreement is not None:
            return Agreement.model_validate_json(run.task.agreement)
        usable = [spec for spec in self._shop.models.specs if not spec.lacks]
        queen = run.task.parent is None
        rewind = self._rewind if queen and run.hive.upkeep.same_thread == "rollback" else None
        undo = Undo() if rewind is None else await find_undo(self._ledger, run.task, run.hive)
        agreement = Agreement(
            queen=queen,
            healing=flags.self_healing_enabled,
            browser=run.hive.upkeep.browser,
            bounds=self._shop.bounds,
            confidence=self._shop.confidence,
            providers=tuple(dict.fromkeys(spec.provider for spec in usable)),
            reflection=bool(usable),
            # Without a normal model the super one does the work to begin with.
            stronger={"normal", "super"} <= {spec.level for spec in usable},
            keeps=rewind is not None,
            undoes=undo.checkpoint,
            shared=undo.shared,
        )
        run.journal.keep(agreement=agreement.model_dump_json())
        return agreement

    async def _work(self, matter: _Matter) -> Outcome:
        from skep.agent.conversation import Conversation
        from skep.tasks.acting import DurableSteps
        from skep.tasks.supervise import Means, Supervisor

        shop, run, thinker, meter = self._shop, matter.run, matter.thinker, matter.meter
        agreed = matter.agreement
        toolbox = shop.toolbox(run.hive) if shop.toolbox else _usual_tools(agreed, shop, run.hive)
        questions = Questions(run, self._ledger, meter, patience_s=shop.approval_timeout_s)
        instructions = worker_instructions(run.hive, matter.memory, matter.failures)
        talk = Conversation.begin(instructions, run.task.prompt, history=matter.history)
        async with self._desk(run, matter.house) as desk:
            steps = DurableSteps(
                run,
                thinker,
                toolbox,
                desk,
                questions=questions,
                meter=meter,
                breakers=shop.breakers,
                policy=shop.policy,
            )
            limits, least = agreed.bounds.limits(), agreed.confidence
            means = Means(thinker, steps, toolbox, desk, meter, limits, least, agreed.options)
            return await Supervisor(run, talk, means).carry()

    @asynccontextmanager
    async def _desk(self, run: Run, house: House) -> AsyncIterator[Desk]:
        """Lay out a desk, and bring its computer up while the model thinks about the first act."""
        from skep.agent.desk import TIMEOUTS, Desk

        usual = dict.fromkeys(("run_command", "run_python"), self._shop.command_timeout_s)
        task, hive = run.task, run.hive
        resolve = partial(self._shop.sessions.resolve, hive, task.thread, account_id=task.account_id)
        warming: asyncio.Task[Computer] | None = asyncio.create_task(resolve(), name=f"skep computer {task.id}")

        async def computer() -> Computer:
            nonlocal warming
            first, warming = warming, None
            return await (resolve() if first is None else first)

        room = "main" if task.parent is None else task.id
        timeouts = {**TIMEOUTS, **usual}
        desk = Desk(computer, room=room, task=task.id, household=house.folder, skills=house.skills, timeouts=timeouts)
        try:
            yield desk
        except asyncio.CancelledError:
            await desk.close(stop=True)
            raise
        finally:
            await desk.close()
            if warming is not None:
                warming.cancel()
                with suppress(asyncio.CancelledError, SkepError):
                    await warming

    async def keep_trajectory(self, task: Task, hive: Hive) -> None:
        if (await self._shop.flags(hive)).file_memory_enabled:
            await append_trajectory(self._ledger, self._shop.household(hive).folder, task, hive)


def _usual_tools(agreed: Agreement, shop: Workshop, hive: Hive) -> Toolbox:
    from skep.agent.toolbox import Toolbox

    return Toolbox(browser=agreed.browser, network=shop.network, listed=shop.listed(hive))


@asynccontextmanager
async def open_worker(workshop: Workshop) -> AsyncIterator[Worker]:
    """Work on tasks in this process until the block ends; what is not done then goes on elsewhere, or next time."""
    bench = _Bench(workshop)
    async with run_worker(
        workshop.database,
        workshop.log,
        workshop.leases,
        host=workshop.host,
        carry=bench.carry,
        jobs={"trajectory": bench.keep_trajectory, **workshop.jobs},
        pace=workshop.pace,
        usd_per_day=workshop.usd_per_day,
    ) as worker:
        bench.wake = worker.wake
        yield worker
