"""The standard input and output of a relay on a machine of E2B, by E2B's interface for processes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from skep.errors import SandboxLost, SkepError
from skep.sandbox.e2b.machine import Machine
from skep.sandbox.relay.link import Line

if TYPE_CHECKING:
    from e2b.sandbox_async.commands.command_handle import AsyncCommandHandle

#: How long a connection that was lost is tried for again while nobody says that the machine is gone.
_RECONNECT_S = 30.0
_REST_S = 0.2
_FAREWELL_S = 2.0
#: How many pieces wait for the reader before E2B has to.
_AHEAD = 8


class MachineLine(Line):
    """Opened first it starts the relay, and later it finds it again."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._pid = 0
        self._handle: AsyncCommandHandle[Any] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._attempt: asyncio.Task[AsyncCommandHandle[Any]] | None = None
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(_AHEAD)

    async def open(self) -> None:
        if not self._pid:
            self._handle = await self._machine.spawn(self._hear)
            self._pid = self._handle.pid
        else:
            await self._let_go()
            self._handle = await self._attached()
        self._ending = asyncio.ensure_future(self._await_end(self._handle))

    async def read(self) -> bytes:
        return await self._pieces.get()

    async def write(self, data: bytes) -> None:
        try:
            await self._machine.send(self._pid, data)
        except SandboxLost:
            raise
        except SkepError as error:
            raise ConnectionError(error.message) from error

    async def close(self) -> None:
        await self._let_go()
        self._cut()

    async def _hear(self, text: str) -> None:
        await self._pieces.put(text.encode())

    async def _attached(self) -> AsyncCommandHandle[Any]:
        deadline = asyncio.get_running_loop().time() + _RECONNECT_S
        while True:
            # Shielded, since the SDK leaves an error behind that nobody asked for when it is cancelled here.
            self._attempt = asyncio.ensure_future(self._machine.attach(self._pid, self._hear))
            try:
                return await asyncio.shield(self._attempt)
            except SandboxLost:
                raise
            except SkepError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise SandboxLost(f"the machine cannot be reached: {error.message}", hint=error.hint) from error
                await asyncio.sleep(_REST_S)

    async def _await_end(self, handle: AsyncCommandHandle[Any]) -> None:
        ended = asyncio.ensure_future(handle.wait())
        await asyncio.wait([ended])
        if not ended.cancelled():
            ended.exception()  # however it ended: who connects again learns whether the machine is there
        self._cut()

    def _cut(self) -> None:
        """Let the reader know; what has not been read yet is said again over the next connection."""
        while not self._pieces.empty():
            self._pieces.get_nowait()
        self._pieces.put_nowait(b"")

    async def _let_go(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._attempt is not None:
            attempt, self._attempt = self._attempt, None
            await asyncio.wait([attempt], timeout=_FAREWELL_S)
            if self._handle is None and attempt.done() and attempt.exception() is None:
                self._handle = attempt.result()
        if self._handle is not None:
            handle, self._handle = self._handle, None
            await handle.disconnect()
