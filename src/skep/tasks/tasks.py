"""The tasks of a database: asked for, looked at, followed, ended and tried again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection

from skep.state.database import Database
from skep.state.events import Recorded
from skep.state.hives import Hive
from skep.state.log import EventLog
from skep.tasks.task import Step, Task


def _nobody() -> None:
    pass


class Tasks:
    """What a person, or a program for one, does with tasks. It works on the record alone: workers follow it.

    `wake` is called when there is something for a worker of this process to do at once; others look every second.
    """

    def __init__(self, database: Database, log: EventLog, *, wake: Callable[[], None] = _nobody) -> None:
        self._database = database
        self._log = log
        self.wake = wake

    async def submit(
        self, hive: Hive, prompt: str, *, thread: str = "cli:default", actor: str, key: str | None = None
    ) -> Task:
        """Take a prompt; it is on record, and will be worked on, when this returns.

        The same `key` again, of the same account, returns the task that it made first. A thread that is busy does what
        the hive's `same_thread` says: the prompt waits, raises ThreadBusy, or ends the task before it.
        """
        raise NotImplementedError

    async def show(self, task_id: str, *, account_id: str) -> Task:
        """Return a task of that account; NotFound for any other."""
        raise NotImplementedError

    async def list(
        self, *, account_id: str, hive_id: str | None = None, statuses: Collection[str] = (), limit: int = 50
    ) -> list[Task]:
        """Return tasks of an account, the newest first."""
        raise NotImplementedError

    async def steps(self, task_id: str, *, account_id: str) -> list[Step]:
        """Return the durable steps that a task took, for `fork`."""
        raise NotImplementedError

    async def cancel(self, task_id: str, *, account_id: str, actor: str, why: str = "") -> Task:
        """Have a task end at once; harmless if it has ended."""
        raise NotImplementedError

    async def retry(self, task_id: str, *, account_id: str, actor: str) -> Task:
        """Make a new task of an ended one's prompt."""
        raise NotImplementedError

    async def fork(self, task_id: str, step: int, *, account_id: str, actor: str) -> Task:
        """Make a new task that takes over the steps of an ended one up to and with `step`, and goes on from there."""
        raise NotImplementedError

    async def answer(self, task_id: str, answer: str, *, account_id: str, actor: str, call: str | None = None) -> Task:
        """Answer what a task asks, or the question that `call` names; Conflict if it asks nothing."""
        raise NotImplementedError

    def follow(self, task: Task, *, after: int = 0) -> AsyncGenerator[Recorded]:
        """Yield the events of a task and of its children after that sequence number; end behind its TaskEnded."""
        raise NotImplementedError

    async def wait(self, task_id: str, *, account_id: str, timeout_s: float | None) -> Task:
        """Return the task when it has ended, or as it is when the time is up."""
        raise NotImplementedError
