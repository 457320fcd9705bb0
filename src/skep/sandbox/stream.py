"""A sandbox over a byte stream: the whole contract, for mechanisms into which no descriptor can be handed.

Another kernel, another machine, or no isolation at all: the mechanism provides a `Link` to a twin and the `Housing`
around it, and this does the rest.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, ClassVar, Self

from skep.errors import InvalidRequest, SandboxLost, SandboxUnusable
from skep.sandbox.agent import Spawn
from skep.sandbox.command import ENVIRONMENT, FAKEROOT, environment_of, rlimits, words
from skep.sandbox.limits import CommandLimits, Limits
from skep.sandbox.link import Housing, Link
from skep.sandbox.recipe import Recipe
from skep.sandbox.sandbox import Command, Process, Sandbox, Size, User
from skep.sandbox.twin.conversation import Conversation
from skep.sandbox.twin.files import TwinFiles, count
from skep.sandbox.twin.guest import TwinGuest
from skep.sandbox.twin.inside import wire
from skep.sandbox.twin.process import TwinProcess
from skep.sandbox.twin.program import twin_program
from skep.sandbox.twin.tunnel import TwinTunnel

__all__ = ["PYTHON", "StreamSandbox", "twin_program"]

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
        #: What the mechanism keeps around the twin: a process, a container, a machine.
        self.housing = housing
        self._env = {**environment, **recipe.env}
        self._fakeroot = fakeroot
        self._stopping: asyncio.Task[None] | None = None
        #: The house itself has halted everything, the twin too.
        self._resting = False
        self._paused = False
        self._guests: set[TwinGuest] = set()
        self._alone = asyncio.Event()
        self._alone.set()
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
            argv=words(command),
            env=environment_of(self._env, env, user=user, terminal=terminal, fakeroot=self._fakeroot),
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
        return not self._conversation.lost.is_set() and await self.housing.alive()

    async def occupied(self) -> bool:
        return bool(self._guests) or await count(self._conversation) > 0

    async def admit(self) -> socket.socket:
        self._require_here()
        theirs, ours = socket.socketpair()
        self._guests.add(TwinGuest(self._conversation, ours, left=self._left))
        self._alone.clear()
        return theirs

    def _left(self, guest: TwinGuest) -> None:
        self._guests.discard(guest)
        if not self._guests:
            self._alone.set()

    def introduction(self) -> dict[str, Any]:
        return {
            "version": 1,
            "over": "stream",
            "id": self.id,
            "limits": asdict(self.limits),
            "environment": self._env,
            "fakeroot": self._fakeroot,
            "home": self.home,
            "cache": self.cache,
            "kernels": self.kernels,
        }

    @property
    def guests(self) -> int:
        return len(self._guests)

    async def alone(self) -> None:
        await self._alone.wait()

    async def gone(self) -> None:
        await self._conversation.lost.wait()

    async def connect(self, port: int) -> socket.socket:
        if not 0 < port < 65536:
            raise InvalidRequest(f"{port} is not a port", hint="use a number from 1 to 65535")
        if (direct := await self.housing.connect(port)) is not None:
            return direct
        return await TwinTunnel.open(self._conversation, port)

    async def pause(self) -> None:
        self._require_here()
        self._resting = await self.housing.pause()
        if not self._resting:
            await self._conversation.ask(wire.PAUSE)
        self._paused = True

    async def resume(self) -> None:
        self._require_here()
        resumed = await self.housing.resume()
        self._resting = False
        if not resumed:
            await self._conversation.ask(wire.RESUME)
        self._paused = False

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Let nothing inside move for a while, though files can be reached; a house at rest is woken for it."""
        if self._resting:
            await self.resume()
        await self._conversation.ask(wire.PAUSE)
        try:
            yield
        finally:
            if not self._paused and not self._conversation.lost.is_set():
                await self._conversation.ask(wire.RESUME)

    async def discard(self) -> None:
        """Stop, and give up the place with all that is in it, though it was made to be kept."""
        self.housing.forgo()
        await self.stop()

    async def kill_all(self) -> None:
        await self._conversation.ask(wire.KILL_ALL)

    async def end_marked(self, run: str, *, within_s: float = 1.5) -> bool:
        asked = json.dumps({"run": run, "within_s": within_s}).encode()
        try:
            async with asyncio.timeout(within_s):
                return (await self._conversation.ask(wire.END_MARKED, asked)).value == b"true"
        except TimeoutError:
            return False

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self._watching.cancel()
        for guest in list(self._guests):
            await guest.close()
        await self._conversation.close()
        await self.housing.end()

    def _require_here(self) -> None:
        if self._conversation.lost.is_set():
            raise self._conversation.gone()

    def _rlimits(self, command: CommandLimits) -> dict[int, tuple[int, int]]:
        """Return what the kernel inside holds a command to; the twin lowers each to what it has itself."""
        return rlimits(self.limits, command)


def _held(limits: Limits) -> bytes:
    """Return the limits that no kernel inside holds, for the twin to look after."""
    held = {
        "memory": limits.memory_bytes,
        "processes": limits.processes,
        "disk": limits.disk_bytes,
        "inodes": limits.inodes,
    }
    return json.dumps(held).encode()
