"""What the tools of one task work at: the session's computer, found again when it is lost, and what lies around it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from skep.agent.actions import AskUser
from skep.errors import SandboxDisabled, SkepError

if TYPE_CHECKING:
    from skep.agent.window import Window
    from skep.sandbox.sandbox import Sandbox
    from skep.sessions.computer import Computer

Resolve = Callable[[], Awaitable["Computer"]]
Ask = Callable[[AskUser], Awaitable[str | None]]

#: How long each tool takes at most, unless its caller says otherwise.
TIMEOUTS: Mapping[str, float] = MappingProxyType(
    {
        "run_command": 120.0,
        "run_python": 120.0,
        "run_tests": 300.0,
        "install_packages": 600.0,
        "use_skill": 120.0,
        "browse": 30.0,
    }
)
#: How long ending what was started from here may take, and how long a cell has to end by itself.
_STOP_S = 1.5
_CELL_S = 1.0


@dataclass(slots=True)
class Desk:
    """One task's place of work; close it when the task is done.

    `household` is the hive's folder on the host, shown at /workspace/hive; `skills` are the shelves by name. `ask` puts
    a question to the person, who may not answer. Tests and healing may change `timeouts`, which begin as usual.
    """

    resolve: Resolve
    #: The shell and the code context that it uses; tasks that run at once on one computer have different ones.
    room: str = "main"
    #: With what the keys of its acts begin, by which its processes are known.
    task: str | None = None
    household: Path | None = None
    skills: Mapping[str, Path] = field(default_factory=dict)
    ask: Ask | None = None
    timeouts: dict[str, float] = field(default_factory=lambda: dict(TIMEOUTS))
    #: The background commands that were started from here, and how far each has been read.
    jobs: list[str] = field(default_factory=list)
    cursors: dict[str, int] = field(default_factory=dict)
    _computer: Computer | None = None
    _window: Window | None = None

    async def computer(self) -> Computer:
        """Return the computer, resolved once; raise `SandboxDisabled` when it has no sandbox."""
        if self._computer is None:
            self._computer = await self.resolve()
        if self._computer.down is not None:
            down, self._computer = self._computer.down, None  # it may come back
            raise SandboxDisabled(f"there is no sandbox: {down}", hint="go on without one, or say what you cannot do")
        return self._computer

    async def again(self) -> None:
        """Let go of a computer that was lost, so that the next act resolves it anew."""
        self._computer = None
        self.cursors.clear()
        await self._close_window()

    def timeout_s(self, tool: str) -> float:
        return self.timeouts.get(tool, 60.0)

    def double(self, tool: str) -> float:
        """Give a tool twice the time from now on, and return it."""
        self.timeouts[tool] = 2 * self.timeout_s(tool)
        return self.timeouts[tool]

    async def window(self) -> Window:
        """Return the task's browser window, opened by the first use."""
        from skep.agent.window import Window

        if self._window is None or self._window.closed:
            self._window = await Window.open(await self.computer(), timeout_s=self.timeout_s("browse"))
        return self._window

    async def close(self, *, stop: bool = False) -> None:
        """Close what was opened for the task alone. With `stop`, end all that it has left running: it was cancelled."""
        if stop and self._computer is not None:
            with suppress(SkepError, TimeoutError):  # what is gone, or is another's by now, need not be ended
                async with asyncio.timeout(_STOP_S), self._computer.sandbox("exec") as sandbox:
                    giving_up = self._computer.give_up(self.room, within_s=_CELL_S)
                    await asyncio.gather(self._end_processes(sandbox), giving_up)
        await self._close_window()

    async def _end_processes(self, sandbox: Sandbox) -> None:
        for job in sandbox.jobs():
            if job.id in self.jobs and job.running:
                await job.kill()
        if self.task is not None:
            await sandbox.end_marked(self.task, within_s=_STOP_S)

    async def _close_window(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            await window.close()
