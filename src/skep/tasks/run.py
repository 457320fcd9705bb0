"""One task in the hands of one worker: its record, and its durable steps in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from skep.state.accounts import utc_now
from skep.state.events import Event
from skep.state.hives import Hive
from skep.tasks.journal import Journal
from skep.tasks.outline import step_key
from skep.tasks.task import Task

#: Does something under a name, once: see `Engine.step`.
Durably = Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task came to. `why` is one sentence for the person; `before` goes on record before the end."""

    status: Literal["succeeded", "failed"]
    why: str
    reply: str | None = None
    confidence: float | None = None
    partial: bool = False
    before: tuple[Event, ...] = ()


class Run:
    """A task that is worked on. Steps are numbered as they come, the same whenever the task is gone through again."""

    def __init__(
        self, task: Task, hive: Hive, journal: Journal, durably: Durably, *, now: Callable[[], datetime] = utc_now
    ) -> None:
        self.now = now
        self.task = task
        self.hive = hive
        self.journal = journal
        self.number = 0
        #: The call whose act was the last step.
        self.acted = ""
        self._durably = durably

    async def step(self, name: str, body: Callable[[], Awaitable[Any]]) -> Any:
        """Take the next durable step; what it returns is JSON."""
        self.number += 1
        return await self._durably(name, body)

    @property
    def id(self) -> str:
        """What acts are known by outside, together with their call: another one when the task had to be begun anew."""
        return f"{self.task.id}.{self.journal.life}" if self.journal.life else self.task.id

    def forgotten(self, key: str) -> bool:
        """Say, while a step is taken, that it was taken before, and that the engine has lost what came of it."""
        return self.journal.found(step_key(self.number, key))

    def begin_anew(self, life: int) -> None:
        """Keep from now on what is recorded apart from what was."""
        self.journal.life = max(self.journal.life, life)

    @property
    def ahead(self) -> bool:
        """Whether the next step is new: not taken over from the task that this one was forked from."""
        return self.number >= self.task.step

    @property
    def own(self) -> bool:
        """Whether the last step is this task's own, and so belongs on its record."""
        return self.number > self.task.step

    def note(self, key: str, event: Event, *, numbered: bool = False) -> None:
        """Record soon what came of the last step; numbered for what stands for the step itself."""
        if self.own:
            self.journal.note(step_key(self.number, key) if numbered else key, event)

    def note_ahead(self, key: str, event: Event) -> None:
        """Record with what comes next what comes before the next step."""
        if self.ahead:
            self.journal.note(key, event)

    async def rest(self, key: str, seconds: float) -> None:
        """Wait so long, counted from when something was recorded under a key: a worker may have died meanwhile."""
        if key in self.journal:
            passed = (self.now() - (await self.journal.read(key)).at).total_seconds()
            await asyncio.sleep(max(0.0, seconds - max(0.0, passed)))

    async def record(self, key: str, event: Event, **changes: Any) -> None:
        """Record now what is to come before the next step."""
        if self.ahead:
            await self.journal.record((key, event), **changes)
