"""Who carries the tasks of one account, as commands see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from typing import Protocol

from skep.app.program import Program
from skep.errors import InvalidRequest, NotFound
from skep.state.events import Recorded
from skep.state.hives import Hive
from skep.tasks.task import Step, Task
from skep.tasks.tasks import Tasks


class Carrier(Protocol):
    """Who carries the tasks of one account: the engine of this process, or a server."""

    async def submit(self, hive: str | None, prompt: str, *, thread: str, key: str | None = None) -> Task:
        """Take a prompt for a hive by its name or id; None stands for the only one there is."""
        ...

    async def show(self, task_id: str) -> Task: ...
    async def list(
        self, *, hive: str | None = None, statuses: Collection[str] = (), limit: int = 50
    ) -> tuple[Task, ...]: ...
    async def steps(self, task_id: str) -> tuple[Step, ...]: ...
    async def cancel(self, task_id: str, *, why: str = "") -> Task: ...
    async def retry(self, task_id: str) -> Task: ...
    async def fork(self, task_id: str, step: int) -> Task: ...
    async def answer(self, task_id: str, answer: str, *, call: str | None = None) -> Task: ...
    def follow(self, task: Task, *, after: int = 0) -> AsyncGenerator[Recorded]: ...


class OwnCarrier:
    """Tasks of one account in a program that this process has open."""

    def __init__(self, program: Program, tasks: Tasks, account_id: str, actor: str) -> None:
        self._program = program
        self._tasks = tasks
        self._account = account_id
        self._actor = actor

    async def submit(self, hive: str | None, prompt: str, *, thread: str, key: str | None = None) -> Task:
        found = await self._hive(hive)
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


def only(hives: Collection[str]) -> str:
    """Return the one hive that there is; more than one, or none, is for the person to settle."""
    if not hives:
        raise NotFound("there is no hive to ask", hint="make one with: skep hive create garden")
    if len(hives) > 1:
        raise InvalidRequest("which hive is asked?", hint="name it with --hive; list them with: skep hive list")
    return next(iter(hives))
