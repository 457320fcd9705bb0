"""What Ctrl-C means while a task is asked for and followed: once ends the task, twice leaves it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from skep.cli.desk import tell
from skep.errors import SkepError

if TYPE_CHECKING:
    from skep.app.carrier import Carrier
    from skep.tasks.task import Task

#: How long whoever leaves waits for the word that the task is to end.
_GRACE_S = 3.0


class Interrupts:
    """Ends a task at Ctrl-C. At the second the work of this process is cancelled, and `leave` says what that leaves."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._task: Task | None = None
        self._ending: asyncio.Task[Task] | None = None
        self.pressed = 0
        #: How it speaks; whoever has a line of their own on the terminal gives their way to do it.
        self.say: Callable[[str], None] = tell
        self._work = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._press)

    def aim_at(self, task: Task) -> None:
        """Say which task it is, as soon as that is known; it ends at once if somebody wants that already."""
        self._task = task
        if self.pressed:
            self._end(task)

    def _press(self) -> None:
        self.pressed += 1
        if self.pressed > 1 and self._work is not None:
            self._work.cancel()
            return
        self.say("ending the task; Ctrl-C again does not wait for that")
        if self._task is not None:
            self._end(self._task)

    def _end(self, task: Task) -> None:
        self._ending = asyncio.create_task(self._carrier.cancel(task.id, why="Ctrl-C"))
        self._ending.add_done_callback(self._ended)

    def _ended(self, ending: asyncio.Task[Task]) -> None:
        error = None if ending.cancelled() else ending.exception()
        if isinstance(error, SkepError):  # the task may have ended in the meantime
            self.say(error.message)

    async def leave(self) -> None:
        """Say what becomes of the task, for which the word that it is to end is waited for a little."""
        if self._task is None or self._ending is None:
            tell("left before an answer came; if the task was taken, it is in: skep task list")
            return
        try:
            await asyncio.wait([self._ending], timeout=_GRACE_S)
        finally:  # even if a third Ctrl-C ends the wait
            tell(self._left(self._task, self._ending))

    def _left(self, task: Task, ending: asyncio.Task[Task]) -> str:
        if ending.done() and not ending.cancelled() and ending.exception() is None:
            return f"left; {task.id} is on record as to be ended: skep task show {task.id}"
        ending.cancel()
        return f"left; {task.id} may go on. End it with: skep task cancel {task.id}"
