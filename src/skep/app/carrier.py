"""Who carries the tasks of one account, as commands see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from skep.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from skep.state.events import Recorded
    from skep.tasks.task import Step, Task


class Carrier(Protocol):
    """Who carries the tasks of one account: the engine of this process, or a server."""

    async def submit(self, hive: str | None, prompt: str, *, thread: str, key: str | None = None) -> Task:
        """Take a prompt for a hive by its name or id; None stands for the only one there is."""
        ...

    def working(self) -> AbstractAsyncContextManager[None]:
        """See that tasks are worked on while the block runs."""
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


def only(hives: Collection[str]) -> str:
    """Return the one hive that there is; more than one, or none, is for the person to settle."""
    if not hives:
        raise NotFound("there is no hive to ask", hint="make one with: skep hive create garden")
    if len(hives) > 1:
        raise InvalidRequest("which hive is asked?", hint="name it with --hive; list them with: skep hive list")
    return next(iter(hives))
