"""DBOS, which runs tasks durably: a task is a workflow, and what it does is a step whose result is kept.

DBOS is one for a whole process, and keeps its own tables: in a file beside Skep's on SQLite, in a schema of its own on
PostgreSQL. They hold nothing that is not in Skep's own record but the results of steps; without them a task begins
anew, and does not do again what it may have done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skep.errors import Conflict, LeaseLost, NotFound, Unavailable
from skep.state.failures import translated
from skep.state.location import Location
from skep.tasks.queues import AFTERWARDS, LOOK_S, PROMPTS, WORK, Listeners
from skep.tasks.task import Task

if TYPE_CHECKING:
    from dbos import DBOS, DBOSConfig
    from dbos._queue import Queue
    from sqlalchemy import Engine as SyncEngine

#: The form of the workflows: a task that was begun under another is not gone on with by this program.
VERSION = "1"
SCHEMA = "skep_dbos"
#: Threads for what DBOS does with its database, and for whatever else this process leaves to threads.
_THREADS = 64
_TASK, _JOBS = "skep-task", "skep-jobs"

T = TypeVar("T")
Run = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is worked on at once; None sets no limit."""

    concurrent: int = 50
    concurrent_per_account: int = 8
    starts_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Work that a process had begun: `executor` is its name."""

    workflow: str
    executor: str
    queue: str


class Engine:
    """DBOS in this process, on the event loop that started it."""

    def __init__(self, location: Location, executor: str, carry: Run, follow_up: Run) -> None:
        self._place = location
        self.executor = executor
        self.carry = carry
        self.follow_up = follow_up
        #: The workflows that run, each in a task of the loop that DBOS made.
        self._workflows: set[asyncio.Task[Any]] = set()
        self._listeners = Listeners()

    @classmethod
    async def start(cls, location: Location, executor: str, *, carry: Run, follow_up: Run, pace: Pace) -> Engine:
        """Open DBOS; from then on `carry` is called with the id of each task whose turn it is, `follow_up` likewise."""
        global _engine  # noqa: PLW0603 - DBOS knows its workflows by functions of modules, and is one itself
        if _engine is not None:
            raise Conflict("this process has an engine already", hint="close the other worker first")
        _engine = engine = cls(location, executor, carry, follow_up)
        try:
            with translated(location):
                await _launch(location, executor, pace, engine._listeners)
        except BaseException:
            await engine.close()
            raise
        return engine

    def adopt(self, *queues: str) -> None:
        """Take note of the task in which a workflow runs, to end it with the engine. It came from one of the queues."""
        if (task := asyncio.current_task()) is not None:
            self._workflows.add(task)
            task.add_done_callback(self._workflows.discard)
            # There is room for another then.
            task.add_done_callback(lambda _: self._listeners.ring(*queues))

    async def enqueue(self, task: Task) -> None:
        """Put a task in line; harmless if it is."""
        queue = PROMPTS if task.parent is None else WORK
        if task.origin is not None and task.step > 0:
            await self._fork(task, queue)
        else:
            await self._enqueue(_TASK, task.id, queue, task.account_id)

    async def enqueue_afterwards(self, task: Task) -> None:
        """Put the jobs that follow a task in line; harmless if they are."""
        await self._enqueue(_JOBS, f"{task.id}-after", AFTERWARDS, task.account_id)

    async def _enqueue(self, name: str, workflow_id: str, queue: str, account_id: str) -> None:
        from dbos import DBOS

        await self._apart(
            DBOS.enqueue_workflow_with_options_async(
                {
                    "workflow_name": name,
                    "queue_name": queue,
                    "workflow_id": workflow_id,
                    "queue_partition_key": account_id,
                    "app_version": VERSION,
                }
            )
        )
        self._listeners.ring(queue)

    async def _fork(self, task: Task, queue: str) -> None:
        from dbos import DBOS, SetWorkflowID

        known = await self.known([task.id, task.origin or ""])
        if task.origin not in known:
            raise NotFound(f"the steps of {task.origin} are gone", hint=f"begin anew: skep task retry {task.origin}")
        if task.id in known:
            return
        with SetWorkflowID(task.id):
            forking = DBOS.fork_workflow_async(
                task.origin or "",
                task.step + 1,
                application_version=VERSION,
                queue_name=queue,
                queue_partition_key=task.account_id,
            )
            with translated(self._place):
                await forking
        self._listeners.ring(queue)

    async def step(self, name: str, body: Callable[[], Awaitable[Any]]) -> Any:
        """Do something once: when a task is gone on with elsewhere, its result is there. JSON in any case.

        A body that was cut off runs again, so it has to see for itself whether it did something.
        """
        from dbos import DBOS, error

        try:
            with translated(self._place):
                return await DBOS.run_step_async({"name": name}, body)
        except (error.DBOSWorkflowConflictIDError, error.DBOSWorkflowCancelledError) as taken:
            raise LeaseLost("another worker has the task", hint="stop working on it") from taken
        except error.DBOSUnexpectedStepError as other:
            raise Conflict(
                "what this task has done so far does not fit how tasks are carried now", hint="begin it anew"
            ) from other

    async def abandoned(self, alive: Collection[str]) -> Sequence[Abandoned]:
        """Return what processes had begun that are not among those."""
        from dbos import DBOS

        found = await self._apart(
            DBOS.list_workflows_async(status="PENDING", queue_name=list(LOOK_S), load_input=False, load_output=False)
        )
        return [
            Abandoned(one.workflow_id, one.executor_id or "", one.queue_name or PROMPTS)
            for one in found
            if one.executor_id not in alive
        ]

    async def known(self, task_ids: Sequence[str]) -> set[str]:
        """Return those of the tasks that the engine knows."""
        from dbos import DBOS

        asked = DBOS.list_workflows_async(workflow_ids=list(task_ids), load_input=False, load_output=False)
        found = await self._apart(asked)
        return {one.workflow_id for one in found}

    def check(self) -> None:
        """Raise Unavailable unless DBOS looks for work. That its tables answer is seen by whoever asks it for work."""
        if _engine is not self or not self._listeners.listening:
            raise Unavailable("nobody looks for work in the queues", hint="start the process anew")

    async def resume(self, work: Abandoned) -> None:
        """Put work in line again, to be gone on with by any process."""
        from dbos import DBOS

        await self._apart(DBOS.resume_workflow_async(work.workflow, queue_name=work.queue))
        self._listeners.ring(work.queue)

    async def _apart(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something that is no step of the workflow in which it is done, if it is done in one."""
        with translated(self._place):
            return await asyncio.create_task(work, context=Context())

    async def close(self) -> None:
        """Stop taking tasks, and leave to others what runs."""
        global _engine  # noqa: PLW0603
        await _aside(self._listeners.stop)
        for task in self._workflows:
            task.cancel()
        if self._workflows:
            await asyncio.wait(self._workflows)
        await _destroy()
        _engine = None


_engine: Engine | None = None
_connections: SyncEngine | None = None
_registered = False


def _current() -> Engine:
    if _engine is None:
        raise Unavailable("no engine runs in this process", hint="open a worker")
    return _engine


def _register() -> None:
    """Tell DBOS of the two workflows, once: it keeps them for as long as the process lives."""
    global _registered  # noqa: PLW0603
    if _registered:
        return
    from dbos import DBOS

    async def carry() -> None:
        _current().adopt(PROMPTS, WORK)
        await _current().carry(DBOS.workflow_id or "")

    async def follow_up() -> None:
        _current().adopt(AFTERWARDS)
        await _current().follow_up((DBOS.workflow_id or "").removesuffix("-after"))

    DBOS.workflow(name=_TASK, max_recovery_attempts=None)(carry)
    DBOS.workflow(name=_JOBS, max_recovery_attempts=None)(follow_up)
    _registered = True


async def _launch(location: Location, executor: str, pace: Pace, listeners: Listeners) -> None:
    _register()
    if location.path is None:
        # To make its tables DBOS waits for every transaction on the database, and those of this loop would wait for it.
        await asyncio.to_thread(_make_tables, location, executor)
    # On this thread: the loop that runs here is the one on which workflows will run.
    dbos = _open(location, executor)
    listeners.start(dbos, await _declare_queues(pace))


def _open(location: Location, executor: str) -> DBOS:
    from dbos import DBOS

    global _connections  # noqa: PLW0603 - like DBOS itself
    _connections = _sqlite(location) if location.path is not None else _postgresql(location)
    dbos = DBOS(config=_config(_connections, executor))
    DBOS.listen_queues([])
    DBOS.launch()
    return dbos


def _make_tables(location: Location, executor: str) -> None:
    """Have DBOS bring its schema up to date, unless it is; no work is taken meanwhile."""
    from dbos import DBOS, error

    for migrates in (False, True):
        engine = _postgresql(location)
        DBOS(config={**_config(engine, executor), "run_migrations": migrates})
        DBOS.listen_queues([])
        try:
            DBOS.launch()
        except error.DBOSInitializationError:
            if migrates:
                raise
        else:
            return
        finally:
            DBOS.destroy()
            engine.dispose()


async def _declare_queues(pace: Pace) -> list[Queue]:
    from dbos import DBOS

    per_minute = pace.starts_per_minute
    limiter = None if per_minute is None else {"limit": per_minute, "period": 60.0}
    return [
        await DBOS.register_queue_async(
            name,
            worker_concurrency=max(pace.concurrent, pace.concurrent_per_account),
            partition_concurrency=pace.concurrent_per_account,
            partition_limiter=limiter if name == PROMPTS else None,  # type: ignore[arg-type]
            polling_interval_sec=look_s,
            on_conflict="always_update",
        )
        for name, look_s in LOOK_S.items()
    ]


async def _destroy() -> None:
    from dbos import DBOS

    await _aside(DBOS.destroy)
    if _connections is not None:  # DBOS leaves alone what it was given
        await _aside(_connections.dispose)
    # DBOS had made its threads those of the loop, and they are gone.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))


async def _aside(work: Callable[[], None]) -> None:
    """Wait for what waits for threads that need this loop; those of the loop itself may be gone."""
    with ThreadPoolExecutor(1) as alone:
        await asyncio.get_running_loop().run_in_executor(alone, work)


def _config(engine: SyncEngine, executor: str) -> DBOSConfig:
    from dbos import DBOSPortableJSONSerializer

    return {
        "name": "skep",
        "system_database_url": engine.url.render_as_string(hide_password=False),
        "system_database_engine": engine,
        "dbos_system_schema": SCHEMA,
        "serializer": DBOSPortableJSONSerializer(),
        "application_version": VERSION,
        "executor_id": executor,
        "max_executor_threads": _THREADS,
        "use_listen_notify": False,
        # Nothing is waited for in this way; but closing waits for whoever looks.
        "notification_listener_polling_interval_sec": 0.05,
        "enable_otlp": False,
        "log_level": "CRITICAL",
    }


def _sqlite(location: Location) -> SyncEngine:
    from sqlalchemy import create_engine, event

    file = Path(location.url.database or "").with_name("dbos.db")
    file.touch(mode=0o600)
    engine = create_engine(f"sqlite:///{file}", connect_args={"timeout": 30.0})

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        connection.isolation_level = "IMMEDIATE"
        # What a power failure takes of it is done again, or known from Skep's own record to have been begun.
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "busy_timeout = 30000", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    return engine


def _postgresql(location: Location) -> SyncEngine:
    from sqlalchemy import create_engine

    keep = {"keepalives": 1, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
    arguments: dict[str, Any] = {**keep, "application_name": "skep dbos", "connect_timeout": 10}
    own = location.url.query
    return create_engine(
        location.url,
        connect_args={name: value for name, value in arguments.items() if name not in own},
        pool_size=10,
        max_overflow=10,
        pool_pre_ping=True,
    )
