"""A sandbox over a byte stream: the whole contract, for mechanisms into which no descriptor can be handed.

Another kernel, another machine, or no isolation at all: the mechanism provides a `Link` to a twin and the `Housing`
around it, and this does the rest.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
from collections.abc import Mapping
from typing import ClassVar, Self

from skep.errors import InvalidRequest, SandboxLost, SandboxUnusable
from skep.sandbox.agent import Spawn
from skep.sandbox.limits import CommandLimits, Limits
from skep.sandbox.link import Housing, Link
from skep.sandbox.recipe import Recipe
from skep.sandbox.sandbox import Command, Process, Sandbox, Size, User
from skep.sandbox.twin.conversation import Conversation
from skep.sandbox.twin.files import TwinFiles, count
from skep.sandbox.twin.inside import wire
from skep.sandbox.twin.process import TwinProcess
from skep.sandbox.twin.program import twin_program
from skep.sandbox.twin.tunnel import TwinTunnel

__all__ = ["ENVIRONMENT", "FAKEROOT", "PYTHON", "StreamSandbox", "twin_program"]

#: What a command finds, unless the mechanism says otherwise.
ENVIRONMENT = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "LOGNAME": "agent",
    "PATH": "/workspace/.venv/bin:/workspace/node_modules/.bin:/usr/local/bin:/usr/bin:/bin",
    "SHELL": "/bin/bash",
    "TMPDIR": "/tmp",
    "USER": "agent",
    "XDG_CACHE_HOME": "/cache",
}
#: Where the mechanism has put the library that makes a user look like root.
FAKEROOT = "/run/skep/fakeroot.so"
#: What runs the twin inside; its path and options follow.
PYTHON = ("python3", "-I", "-S", "-u")
_READY_S = 20.0
#: How long a twin may be silent whose house still stands.
_PATIENCE_S = 30.0


class StreamSandbox(Sandbox):
    """A sandbox held by a twin inside and a house around it."""

    mechanism: ClassVar[str] = "stream"

    def __init__(
        self,
        conversation: Conversation,
        housing: Housing,
        recipe: Recipe,
        *,
        environment: Mapping[str, str],
        fakeroot: str,
        patience_s: float,
    ) -> None:
        super().__init__()
        self.id = housing.id
        self.limits = recipe.limits
        self.files: TwinFiles = TwinFiles(conversation)
        self._conversation = conversation
        self._housing = housing
        self._env = {**environment, **recipe.env}
        self._root_env = {"LOGNAME": "root", "USER": "root", "LD_PRELOAD": fakeroot}
        self._stopping: asyncio.Task[None] | None = None
        #: The house itself has halted everything, the twin too.
        self._resting = False
        self._watching = asyncio.create_task(
            conversation.watch_over(housing.alive, resting=lambda: self._resting, patience_s=patience_s)
        )

    @classmethod
    async def over(
        cls,
        link: Link,
        housing: Housing,
        recipe: Recipe,
        *,
        mechanism: str | None = None,
        environment: Mapping[str, str] = ENVIRONMENT,
        fakeroot: str = FAKEROOT,
        patience_s: float = _PATIENCE_S,
    ) -> Self:
        """Talk to a twin that has been started; the sandbox serves commands when this returns.

        If that fails the link is closed and the house ended.
        """
        conversation = Conversation(link)
        try:
            async with asyncio.timeout(_READY_S):
                await conversation.begin()
                await conversation.ask(wire.LIMITS, _held(recipe.limits))
        except BaseException as error:
            await conversation.close()
            await housing.end()
            if isinstance(error, SandboxLost | TimeoutError):
                raise SandboxUnusable(
                    f"the sandbox did not start: {conversation.why}",
                    hint="it needs Python 3.9 or newer inside; `skep doctor` shows what else is missing",
                ) from error
            raise
        made = cls(conversation, housing, recipe, environment=environment, fakeroot=fakeroot, patience_s=patience_s)
        if mechanism is not None:
            made.mechanism = mechanism  # type: ignore[misc] # one class serves several mechanisms
        return made

    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User = "agent",
        stdin: bool = False,
        channel: bool = False,
        terminal: Size | None = None,
        timeout_s: float | None = None,
        limits: CommandLimits | None = None,
    ) -> Process:
        spawn = Spawn(
            argv=_argv(command),
            env=self._environment(user, env, terminal),
            cwd=os.path.join("/workspace", cwd or ""),
            limits=self._rlimits(limits or CommandLimits()),
        )
        return await TwinProcess.start(
            self._conversation,
            spawn,
            cpu_s=limits.cpu_s if limits else None,
            stdin=stdin,
            channel=channel,
            terminal=terminal,
            timeout_s=timeout_s,
        )

    async def alive(self) -> bool:
        return not self._conversation.lost.is_set() and await self._housing.alive()

    async def occupied(self) -> bool:
        return await count(self._conversation) > 0

    async def gone(self) -> None:
        await self._conversation.lost.wait()

    async def connect(self, port: int) -> socket.socket:
        if not 0 < port < 65536:
            raise InvalidRequest(f"{port} is not a port", hint="use a number from 1 to 65535")
        if (direct := await self._housing.connect(port)) is not None:
            return direct
        return await TwinTunnel.open(self._conversation, port)

    async def pause(self) -> None:
        self._require_here()
        self._resting = await self._housing.pause()
        if not self._resting:
            await self._conversation.ask(wire.PAUSE)

    async def resume(self) -> None:
        self._require_here()
        resumed = await self._housing.resume()
        self._resting = False
        if not resumed:
            await self._conversation.ask(wire.RESUME)

    async def kill_all(self) -> None:
        await self._conversation.ask(wire.KILL_ALL)

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self._watching.cancel()
        await self._conversation.close()
        await self._housing.end()

    def _require_here(self) -> None:
        if self._conversation.lost.is_set():
            raise self._conversation.gone()

    def _environment(self, user: User, env: Mapping[str, str] | None, terminal: Size | None) -> dict[str, str]:
        extra = {"TERM": "xterm-256color"} if terminal else {}
        return {**self._env, **extra, **(self._root_env if user == "root" else {}), **(env or {})}

    def _rlimits(self, command: CommandLimits) -> dict[int, tuple[int, int]]:
        """Return what the kernel inside holds a command to; the twin lowers each to what it has itself."""
        return rlimits(self.limits, command)


def rlimits(sandbox: Limits, command: CommandLimits) -> dict[int, tuple[int, int]]:
    """Return the limits of a command for a kernel that may be another than this one."""
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: command.file_bytes or sandbox.disk_bytes,
        resource.RLIMIT_NOFILE: command.open_files or sandbox.open_files,
        resource.RLIMIT_NPROC: command.processes or sandbox.processes,
    }
    if command.cpu_s is not None:
        wanted[resource.RLIMIT_CPU] = command.cpu_s
    if command.memory_bytes is not None:
        wanted[resource.RLIMIT_AS] = command.memory_bytes
    hard = {resource.RLIMIT_CPU: 1}  # the warning signal, then a second later the final one
    return {kind: (value, value + hard.get(kind, 0)) for kind, value in wanted.items()}


def _held(limits: Limits) -> bytes:
    """Return the limits that no kernel inside holds, for the twin to look after."""
    held = {
        "memory": limits.memory_bytes,
        "processes": limits.processes,
        "disk": limits.disk_bytes,
        "inodes": limits.inodes,
    }
    return json.dumps(held).encode()


def _argv(command: Command) -> list[str]:
    argv = ["/bin/bash", "-c", command] if isinstance(command, str) else list(command)
    if not argv or not argv[0]:
        raise InvalidRequest("the command is empty", hint="give a program to run")
    return argv
