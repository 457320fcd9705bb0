"""A session's computer as its user gets it: every call is checked before it is made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from skep.errors import SandboxDisabled
from skep.sandbox.files import Files
from skep.sandbox.sandbox import Command, Execution, Job, Process, Sandbox, Size, User
from skep.sandbox.shell import Shell
from skep.sessions.live import Live

if TYPE_CHECKING:
    from skep.sandbox.limits import CommandLimits

#: Raises Denied, after it was recorded, unless the caller may use the session for this act.
Check = Callable[[str], Awaitable[None]]
#: Takes note that a shell or a context was opened; says whether it takes the place of one that is gone.
Open = Callable[[str], Awaitable[bool]]


class Computer:
    """What a caller may do with a session. `down` says why there is no sandbox, if there is none."""

    def __init__(self, live: Live | None, check: Check, open_room: Open, *, down: str | None = None) -> None:
        self._live = live
        self._check = check
        self._open_room = open_room
        self.down = down

    @asynccontextmanager
    async def sandbox(self, act: str = "use") -> AsyncIterator[Sandbox]:
        """Use the sandbox itself; for as long as the block runs, the session counts as busy."""
        await self._check(act)
        if self._live is None:
            raise SandboxDisabled(
                f"there is no sandbox for now: {self.down}", hint="it comes back by itself; try later"
            )
        with self._live.used() as sandbox:
            yield sandbox

    async def run(
        self,
        command: Command,
        *,
        input: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User = "agent",
        timeout_s: float | None = None,
        limits: CommandLimits | None = None,
    ) -> Execution:
        """Run a command to its end; see `Sandbox.run`."""
        async with self.sandbox("exec") as sandbox:
            return await sandbox.run(
                command, input=input, cwd=cwd, env=env, user=user, timeout_s=timeout_s, limits=limits
            )

    async def start(
        self, command: Command, *, cwd: str | None = None, stdin: bool = False, terminal: Size | None = None
    ) -> Process:
        """Start a command and return at once; see `Sandbox.start`."""
        async with self.sandbox("exec") as sandbox:
            return await sandbox.start(command, cwd=cwd, stdin=stdin, terminal=terminal)

    async def background(self, command: Command, *, cwd: str | None = None) -> Job:
        """Start a command that outlives this call; see `Sandbox.background`."""
        async with self.sandbox("exec") as sandbox:
            return await sandbox.background(command, cwd=cwd)

    @asynccontextmanager
    async def files(self) -> AsyncIterator[Files]:
        """Read and change the files."""
        async with self.sandbox("files") as sandbox:
            yield sandbox.files

    async def shell(self, name: str = "main") -> tuple[Shell, bool]:
        """Return the shell of that name, and whether it takes the place of one whose variables are gone."""
        async with self.sandbox("exec") as sandbox:
            assert self._live is not None
            if (known := self._live.shells.get(name)) is not None:
                return known, False
            replaced = await self._open_room(f"shell:{name}")
            shell = self._live.shells[name] = await sandbox.shell()
            return shell, replaced
