"""Follow a task to its end: tell what happens, and answer what it asks."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING

from skep.cli.desk import tell
from skep.cli.storyline import Story, spent
from skep.cli.terminal import INTERRUPTED, print_line
from skep.errors import Conflict, InvalidRequest
from skep.state.events import Answered, Asked, TaskEnded
from skep.state.wire import as_json

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from skep.app.carrier import Carrier
    from skep.cli.interrupting import Interrupts
    from skep.state.events import Recorded
    from skep.tasks.task import Task

FAILED = 1


class Following:
    """One task, followed for a person at a terminal or for a program."""

    def __init__(self, carrier: Carrier, task: Task, interrupts: Interrupts, *, as_json: bool) -> None:
        self._carrier = carrier
        self._task = task
        self._as_json = as_json
        self._story = Story(task)
        self._interrupts = interrupts
        self._beside: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Follow to the end; return the exit code."""
        self._interrupts.say = lambda text: self._story.say(text, "bad", whole=True)
        try:
            await self._watch()
        finally:
            self._interrupts.say = tell
            self._story.hush()
            for one in self._beside:
                one.cancel()
            if self._beside:
                await asyncio.wait(self._beside)
        return self._end(await self._carrier.show(self._task.id))

    async def _watch(self) -> None:
        async with aclosing(self._carrier.follow(self._task)) as events:
            async for recorded in events:
                if self._as_json:
                    sys.stdout.write(json.dumps(as_json(recorded), ensure_ascii=False) + "\n")
                    sys.stdout.flush()
                else:
                    self._story.tell(recorded)
                self._listen(recorded)
                if recorded.task_id == self._task.id and isinstance(recorded.event, TaskEnded):
                    return

    def _listen(self, recorded: Recorded) -> None:
        match recorded.event:
            case Asked(call=call):
                if sys.stdin.isatty() and not self._as_json:
                    self._asking = self._start(self._answer(recorded.task_id or self._task.id, call))
                elif not self._as_json:
                    self._story.say(f"answer with: skep task answer {recorded.task_id} TEXT", "plain")
            case Answered() if self._asking is not None:
                self._asking.cancel()  # somebody else was faster

    async def _answer(self, task_id: str, call: str) -> None:
        """Have the person answer; one that does not do is said to be so, and asked for again."""
        while line := await _prompted():
            if not line.strip():
                continue
            try:
                await self._carrier.answer(task_id, line.strip(), call=call)
            except Conflict:
                raise
            except InvalidRequest as error:
                self._story.say(str(error), "bad", whole=True)
            else:
                return

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # it may have ended, or been answered, in the meantime
            self._story.say(str(error), "bad", whole=True)

    def _end(self, task: Task) -> int:
        if not self._as_json:
            if task.reply:
                print_line(task.reply)
                sys.stdout.flush()
            self._story.say(_ending(task), "ok" if task.status == "succeeded" else "bad", whole=True)
        sys.stdout.flush()
        match task.status:
            case "succeeded":
                return 0
            case "cancelled" if self._interrupts.pressed:
                return INTERRUPTED
            case _:
                return FAILED


def _ending(task: Task) -> str:
    partly = ", in part" if task.partial else ""
    why = f": {task.error}" if task.error else ""
    sure = f", {task.confidence:.0%} sure" if task.status == "succeeded" and task.confidence is not None else ""
    return f"{task.status}{partly}{sure}{why} ({spent(task)})"


async def _prompted() -> str:
    sys.stderr.write("> ")
    sys.stderr.flush()
    return await _typed()


async def _typed() -> str:
    """Return the next line from the terminal; empty at its end."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def readable() -> None:
        if not line.done():
            line.set_result(sys.stdin.readline())

    loop.add_reader(sys.stdin.fileno(), readable)
    try:
        return await line
    finally:
        loop.remove_reader(sys.stdin.fileno())
