"""A session's computer as its user gets it: every call is checked before it is made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from skep.errors import SandboxDisabled, Unavailable
from skep.sandbox.files import Files
from skep.sandbox.sandbox import Command, Execution, Job, Process, Sandbox, Size, User
from skep.sandbox.shell import Shell
from skep.sessions.live import Live

if TYPE_CHECKING:
    from skep.sandbox.context import Context
    from skep.sandbox.limits import CommandLimits
    from skep.sandbox.ports import Exposure
    from skep.sandbox.results import Cell, Language
    from skep.workspace.packages.packages import Installed

Kind = Literal["shell", "context"]
#: Raises Denied, after it was recorded, unless the caller may use the session for this act.
Check = Callable[[str], Awaitable[None]]
#: Takes note that a shell or a context was opened; says whether it takes the place of one that is gone.
Open = Callable[[Live, Kind, str], Awaitable[bool]]


class Install(Protocol):
    """Installs packages into the workspace of a computer."""

    async def __call__(self, *, python: Sequence[str], node: Sequence[str]) -> Installed: ...


class Computer:
    """What a caller may do with a session. `down` says why there is no sandbox, if there is none."""

    def __init__(
        self,
        live: Live | None,
        check: Check,
        open_room: Open,
        *,
        install: Install | None = None,
        down: str | SandboxDisabled | None = None,
    ) -> None:
        self._live = live
        self._check = check
        self._open_room = open_room
        self._install = install
        self.down = down.message if isinstance(down, SandboxDisabled) else down
        self._hint = down.hint if isinstance(down, SandboxDisabled) else "it comes back by itself; try later"

    @asynccontextmanager
    async def sandbox(self, act: str = "use") -> AsyncIterator[Sandbox]:
        """Use the sandbox itself; for as long as the block runs, the session counts as busy."""
        async with self._used(act) as live:
            yield live.sandbox

    @asynccontextmanager
    async def _used(self, act: str) -> AsyncIterator[Live]:
        await self._check(act)
        if self._live is None:
            raise SandboxDisabled(f"there is no sandbox for now: {self.down}", hint=self._hint)
        with self._live.used():
            yield self._live

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
        """Start a command and return at once; see `Sandbox.start`. While it runs the session counts as busy."""
        async with self.sandbox("exec") as sandbox:
            return await sandbox.start(command, cwd=cwd, stdin=stdin, terminal=terminal)

    async def background(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Job:
        """Start a command that outlives this call; see `Sandbox.background`. While it runs the session is busy."""
        async with self.sandbox("exec") as sandbox:
            return await sandbox.background(command, cwd=cwd, env=env)

    async def expose(self, port: int) -> Exposure:
        """Make a server that listens inside reachable until the computer ends; see `Sandbox.expose`."""
        async with self._used("exec") as live, live.opening:
            known = live.exposures.get(port)
            if known is None or known.closed:
                (await live.sandbox.connect(port)).close()
                known = live.exposures[port] = await live.sandbox.expose(port)
            return known

    async def install(self, *, python: Sequence[str] = (), node: Sequence[str] = ()) -> Installed:
        """Install packages into the workspace for good; see `skep.workspace.packages`. If it fails nothing has changed.

        What runs inside goes on. Meanwhile the session counts as busy.
        """
        async with self._used("install"):
            if self._install is None:
                raise Unavailable("packages cannot be installed into this workspace", hint="do without")
            return await self._install(python=python, node=node)

    @asynccontextmanager
    async def files(self) -> AsyncIterator[Files]:
        """Read and change the files; for as long as the block runs, the session counts as busy."""
        async with self.sandbox("files") as sandbox:
            yield sandbox.files

    async def shell(self, name: str = "main") -> ShellRoom:
        """Return the shell of that name, opened if there is none."""
        async with self._used("exec") as live, live.opening:
            if (known := live.shells.get(name)) is not None:
                return ShellRoom(self, known, replaced=False)
            replaced = await self._open_room(live, "shell", name)
            live.shells[name] = await live.sandbox.shell()
            return ShellRoom(self, live.shells[name], replaced=replaced)

    async def context(self, name: str = "default", *, language: Language = "python") -> ContextRoom:
        """Return the context for code of that name, opened if there is none."""
        async with self._used("exec") as live, live.opening:
            is_known = any(context.name == name for context in live.interpreter.contexts())
            context = live.interpreter.context(name, language=language)
            replaced = not is_known and await self._open_room(live, "context", name)
            if replaced:
                context.say_lost()
            return ContextRoom(self, context, replaced=replaced)

    async def give_up(self, name: str, *, within_s: float) -> None:
        """End a cell that still runs in a context though its call was cancelled; see `Context.give_up`."""
        async with self._used("exec") as live:
            for context in live.interpreter.contexts():
                if context.name == name:
                    await context.give_up(within_s=within_s)


@dataclass(frozen=True, slots=True)
class ShellRoom:
    """A shell that lasts as long as the sandbox. `replaced`: it takes the place of one whose variables are gone."""

    _computer: Computer
    _shell: Shell
    replaced: bool

    async def run(
        self, command: str, *, input: bytes = b"", key: str | None = None, timeout_s: float | None = None
    ) -> Execution:
        """Run a command where the last one left off; `SandboxLost` when the shell has gone with its sandbox."""
        async with self._computer.sandbox("exec"):
            return await self._shell.run(command, input=input, key=key, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class ContextRoom:
    """A context for code. `replaced`: it takes the place of one whose variables are gone, and its next cell says so."""

    _computer: Computer
    _context: Context
    replaced: bool

    async def run(self, code: str, *, key: str | None = None, timeout_s: float | None = None) -> Cell:
        """Run a cell where the last one left off; `SandboxLost` when the context has gone with its sandbox."""
        async with self._computer.sandbox("exec"):
            return await self._context.run(code, key=key, timeout_s=timeout_s)
