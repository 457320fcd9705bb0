"""Tasks in this process: what a command does when no server of its home runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager

from skep.app.apiary import Tell, quiet
from skep.app.carrier import only
from skep.app.modelling import build_models
from skep.app.program import Program
from skep.config import Environment
from skep.state.events import Recorded
from skep.state.hives import Hive
from skep.tasks.task import Step, Task
from skep.tasks.tasks import Tasks

#: How long what follows a task is waited for, when the reply is out.
_JOBS_S = 5.0


class LocalTasks:
    """The tasks of one account in a program that this process has open; see `skep.app.carrier.Carrier`."""

    def __init__(
        self, program: Program, environment: Environment, account_id: str, *, actor: str, tell: Tell = quiet
    ) -> None:
        self._program = program
        self._environment = environment
        self._account = account_id
        self._actor = actor
        self._tell = tell
        self._tasks = Tasks(program.database, program.log, usd_per_day=program.settings.budgets.usd_per_day)

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        # It takes long to load, and most commands have no use for it.
        from skep.app.engine import open_engine

        async with open_engine(self._program, self._environment, tell=self._tell) as engine:
            self._tasks = engine.worker.tasks
            yield
            await engine.worker.settle(_JOBS_S)

    async def submit(self, hive: str | None, prompt: str, *, thread: str, key: str | None = None) -> Task:
        found = await self._hive(hive)
        build_models(self._program.settings, self._environment).choose("work")  # says which one is missing
        return await self._tasks.submit(found, prompt, thread=thread, actor=self._actor, key=key)

    async def _hive(self, reference: str | None) -> Hive:
        if reference is None:
            every = await self._program.hives.list(account_id=self._account)
            reference = only([hive.id for hive in every])
        return await self._program.hives.show(reference, account_id=self._account)

    async def show(self, task_id: str) -> Task:
        return await self._tasks.show(task_id, account_id=self._account)

    async def list(
        self, *, hive: str | None = None, statuses: Collection[str] = (), limit: int = 50
    ) -> tuple[Task, ...]:
        hive_id = None if hive is None else (await self._hive(hive)).id
        return await self._tasks.list(account_id=self._account, hive_id=hive_id, statuses=statuses, limit=limit)

    async def steps(self, task_id: str) -> tuple[Step, ...]:
        return await self._tasks.steps(task_id, account_id=self._account)

    async def cancel(self, task_id: str, *, why: str = "") -> Task:
        return await self._tasks.cancel(task_id, account_id=self._account, actor=self._actor, why=why)

    async def retry(self, task_id: str) -> Task:
        return await self._tasks.retry(task_id, account_id=self._account, actor=self._actor)

    async def fork(self, task_id: str, step: int) -> Task:
        return await self._tasks.fork(task_id, step, account_id=self._account, actor=self._actor)

    async def answer(self, task_id: str, answer: str, *, call: str | None = None) -> Task:
        return await self._tasks.answer(task_id, answer, account_id=self._account, actor=self._actor, call=call)

    def follow(self, task: Task, *, after: int = 0) -> AsyncGenerator[Recorded]:
        return self._tasks.follow(task, after=after)
