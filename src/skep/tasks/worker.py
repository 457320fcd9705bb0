"""A process that works on tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial

import structlog
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from skep.errors import LeaseLost, NotFound, SkepError, Unavailable
from skep.sessions.controller import TTL_S, Controller
from skep.sessions.loops import Loop, Loops
from skep.state.database import Database
from skep.state.events import Replied
from skep.state.hives import Hives
from skep.state.leases import Leases
from skep.state.log import EventLog
from skep.state.schema import tasks as rows
from skep.tasks.afterwards import Jobs, follow_up
from skep.tasks.dispatch import WINDOW, Dispatcher
from skep.tasks.engine import Engine, Pace
from skep.tasks.journal import Journal
from skep.tasks.ledger import held_by
from skep.tasks.relief import Relief
from skep.tasks.run import Outcome, Run
from skep.tasks.task import OPEN, Task
from skep.tasks.tasks import Tasks
from skep.tasks.use import Use, read_use

#: How often a worker looks for tasks that another process took, for tasks of its own that somebody there wants to end,
#: and for workers that died.
_LOOK_S = 0.5
_CANCEL_S = 0.5
_RELIEF_S = 1.0
#: How long what is to end may take before it is told again.
_INSIST_S = 5.0
_AGAIN_S = 0.5
#: The loops, by what they are for.
_DISPATCH, _RELIEF, _CANCEL = "the dispatch of tasks", "the relief of dead workers", "the watch for cancelled tasks"

#: Carries one task to its outcome.
Carry = Callable[[Run], Awaitable[Outcome]]


class Worker:
    """The engine in this process. `tasks` wakes it, and it works on whatever is on record."""

    def __init__(self, tasks: Tasks, leases: Leases, carry: Carry, jobs: Jobs) -> None:
        tasks.wake = self.wake
        self.tasks = tasks
        self._ledger = tasks.ledger
        self._leases = leases
        self._hives = Hives(self._ledger.database, self._ledger.log)
        self._carry = carry
        self._jobs = jobs
        self._running: dict[str, asyncio.Task[Outcome]] = {}
        #: Those of them that are to end, with the time at which they were last told.
        self._unwanted: dict[str, float] = {}
        self._closing = False
        self._due = asyncio.Event()
        #: Tasks that have ended here, and whose jobs have not been seen to.
        self._unfollowed: set[str] = set()
        self._followed = asyncio.Event()
        self._log = structlog.get_logger("skep.tasks")

    def wake(self) -> None:
        """Have it look at once."""
        self._due.set()

    @property
    def running(self) -> tuple[str, ...]:
        """The ids of the tasks that this process works on."""
        return tuple(self._running)

    def check(self) -> None:
        """Raise Unavailable, in words that anybody may read, if tasks are not worked on here."""
        self._controller.check()
        self._loops.check()
        self._engine.check()

    @asynccontextmanager
    async def _open(self, controller: Controller, pace: Pace) -> AsyncIterator[None]:
        self._controller, self._name = controller, controller.name
        self._loops = Loops(stall_s=controller.ttl_s)
        self._engine = await Engine.start(
            self._ledger.database.location,
            controller.name,
            carry=self._work,
            follow_up=self._follow_up,
            pace=pace,
        )
        dispatcher = Dispatcher(self._ledger, self._engine.enqueue, self._engine.enqueue_afterwards)
        relief = Relief(self._ledger, self._leases, self._engine, controller.identity)
        try:
            await relief.take_in()
            loops: dict[str, Loop] = {
                _DISPATCH: partial(self._dispatch, dispatcher),
                _RELIEF: partial(self._relieve, relief),
                _CANCEL: self._watch,
            }
            async with self._loops.kept(loops):
                yield
        finally:
            await self._suspend()
            await self._engine.close()

    async def _dispatch(self, dispatcher: Dispatcher) -> None:
        """Bring tasks to the engine whenever there may be some."""
        while True:
            self._due.clear()
            while (await self._loops.attempt(_DISPATCH, dispatcher.sweep()) or 0) >= WINDOW:
                pass  # there may be more
            await self._loops.attempt(_CANCEL, self._cancel_unwanted())
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._due.wait()

    async def _relieve(self, relief: Relief) -> None:
        while True:
            if left := await self._loops.attempt(_RELIEF, relief.sweep()):
                self._log.info("tasks_taken_over", number=left)
            await asyncio.sleep(_RELIEF_S)

    async def _watch(self) -> None:
        """Look for tasks of this process that somebody elsewhere wants to end."""
        while True:
            await asyncio.sleep(_CANCEL_S)
            await self._loops.attempt(_CANCEL, self._cancel_unwanted())

    async def _cancel_unwanted(self) -> None:
        if not self._running:
            return
        for task in await self._ledger.select(held_by(self._name, "cancelling")):
            if (scope := self._running.get(task.id)) is not None:
                self._cancel(task.id, scope)

    def _cancel(self, task_id: str, scope: asyncio.Task[Outcome]) -> None:
        """Have a task end; again after a while, should something on the way have kept the news to itself."""
        now = asyncio.get_running_loop().time()
        if now - self._unwanted.get(task_id, -_INSIST_S) >= _INSIST_S:
            self._unwanted[task_id] = now
            scope.cancel()

    async def _work(self, task_id: str) -> None:
        """Carry a task from where it is to its end. This is what the engine runs."""
        if self._closing:
            raise asyncio.CancelledError
        task = await self._ledger.start(task_id, worker=self._name)
        if task is None:
            return await self._rest(task_id)
        journal = await Journal.open(self._ledger, task)
        try:
            await self._see_through(task, journal)
        finally:
            self._unwanted.pop(task_id, None)
        return await self._rest(task_id)

    async def _see_through(self, task: Task, journal: Journal) -> None:
        scope = asyncio.create_task(self._carry_out(task, journal), name=f"skep task {task.id}")
        self._running[task.id] = scope
        if task.status == "cancelling":
            self._cancel(task.id, scope)
        try:
            await asyncio.wait([scope])
        finally:
            scope.cancel()  # if it is this that was cancelled
            await asyncio.wait([scope])
            del self._running[task.id]
        if self._closing:
            raise asyncio.CancelledError
        try:
            await self._end(task, self._outcome(task, scope))
        except SQLAlchemyError as error:
            # What the database does not take as it is must not leave a task without an end.
            self._log.exception("end_not_recorded", task=task.id)
            await self._end(task, Outcome("failed", f"Skep itself failed at its end: {type(error).__name__}"))

    async def _carry_out(self, task: Task, journal: Journal) -> Outcome:
        try:
            hive = await self._hives.show(task.hive_id, account_id=task.account_id)
            return await self._carry(Run(task, hive, journal, self._engine.step))
        finally:
            await journal.close()

    def _outcome(self, task: Task, scope: asyncio.Task[Outcome]) -> Outcome | None:
        """Say what came of it; None if it was cancelled."""
        if scope.cancelled():
            return None
        match scope.exception():
            case None:
                return scope.result()
            case LeaseLost() as error:
                raise error  # another has the task, and brings it to its end
            case SkepError() as error:
                return Outcome("failed", error.message if error.hint is None else f"{error.message}; {error.hint}")
            case error:
                self._log.error("task_broke", task=task.id, exc_info=error)
                return Outcome("failed", f"Skep itself failed: {type(error).__name__}: {error}"[:500])

    async def _end(self, task: Task, outcome: Outcome | None) -> None:
        """Write the end of a task, which has come to it whatever becomes of the database meanwhile."""
        now: Task | None = task
        self._unfollowed.add(task.id)  # before somebody can know that it has ended
        while True:
            try:
                if now is None or now.ended or now.starts != task.starts:
                    raise LeaseLost(f"another worker has task {task.id}", hint="stop working on it")
                if await self._write_end(now, outcome):
                    return
                now = await self._ledger.find(task.id)
            except LeaseLost:
                self._unfollowed.discard(task.id)
                raise
            except Unavailable:
                await asyncio.sleep(_AGAIN_S)

    async def _write_end(self, task: Task, outcome: Outcome | None) -> bool:
        used = await read_use(self._ledger, task)
        if outcome is None or task.status == "cancelling":
            why = task.error or "somebody cancelled it"
            return await self._ledger.end(task, "cancelled", why=why, actor="worker", error=why, **asdict(used))
        said = () if outcome.reply is None else (_reply(outcome, used),)
        return await self._ledger.end(
            task,
            outcome.status,
            why=outcome.why,
            actor="worker",
            before=[*outcome.before, *said],
            reply=outcome.reply,
            confidence=outcome.confidence,
            partial=outcome.partial,
            error=None if outcome.status == "succeeded" else outcome.why,
            **asdict(used),
        )

    async def _rest(self, task_id: str) -> None:
        """See to what is left when a task has ended: its children, its jobs, and those who wait for it."""
        self.tasks.ended(task_id)
        task = await self._ledger.find(task_id)
        if task is None or not task.ended:
            return
        children = select(rows).where(rows.c.parent == task_id, rows.c.status.in_(OPEN))
        for child in await self._ledger.select(children):
            why = f"{task_id} has ended"
            await self.tasks.cancel(child.id, account_id=child.account_id, actor="queen", why=why)
        await self._engine.enqueue_afterwards(task)
        self.wake()

    async def settle(self, timeout_s: float) -> None:
        """Wait until the jobs of the tasks that ended here are done; what takes longer is left to other workers."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._unfollowed:
                    self._followed.clear()
                    await self._followed.wait()

    async def _follow_up(self, task_id: str) -> None:
        if self._closing:
            raise asyncio.CancelledError
        try:
            await self._do_jobs(task_id)
        finally:
            self._unfollowed.discard(task_id)
            self._followed.set()

    async def _do_jobs(self, task_id: str) -> None:
        task = await self._ledger.find(task_id)
        if task is None:
            return
        with suppress(NotFound):  # a hive that was deleted since learns nothing more
            hive = await self._hives.show(task.hive_id, account_id=task.account_id)
            await follow_up(self._ledger, task, hive, self._jobs, self._engine.step)

    async def _suspend(self) -> None:
        """Break off what runs, without an end: another process, or this one later, goes on with it."""
        self._closing = True
        scopes = list(self._running.values())
        for scope in scopes:
            scope.cancel()
        if scopes:
            await asyncio.wait(scopes)


def _reply(outcome: Outcome, used: Use) -> Replied:
    return Replied(
        text=outcome.reply or "", confidence=outcome.confidence, partial=outcome.partial, scripted=used.scripted
    )


@asynccontextmanager
async def run_worker(
    database: Database,
    log: EventLog,
    leases: Leases,
    *,
    host: str,
    carry: Carry,
    jobs: Jobs | None = None,
    pace: Pace | None = None,
    usd_per_day: float | None = None,
    ttl_s: float = TTL_S,
) -> AsyncIterator[Worker]:
    """Work on tasks in this process until the block ends; what is not done then goes on elsewhere, or next time."""
    async with AsyncExitStack() as stack:
        controller = await Controller.start(leases, host, ttl_s=ttl_s)
        stack.push_async_callback(controller.stop)
        worker = Worker(Tasks(database, log, usd_per_day=usd_per_day), leases, carry, jobs or {})
        await stack.enter_async_context(worker._open(controller, pace or Pace()))
        yield worker
