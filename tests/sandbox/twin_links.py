"""A link whose twin is the test, and a house without walls."""

from __future__ import annotations

import asyncio

from skep.sandbox.link import Housing, Link
from skep.sandbox.recipe import Recipe
from skep.sandbox.stream import StreamSandbox
from skep.sandbox.twin.inside import wire


class ScriptedLink(Link):
    """Says what it is told to; it has greeted, and answered the first question, which tells it the limits."""

    def __init__(self, *, greet: bool = True, version: int = wire.VERSION) -> None:
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self.heard = bytearray()
        self.closed = asyncio.Event()
        if greet:
            self.say(wire.frame(wire.READY, 0, wire.COUNTED.pack(version)))
        self._greets = greet

    def say(self, data: bytes) -> None:
        self._said.put_nowait(data)

    def hang_up(self) -> None:
        self._said.put_nowait(b"")

    async def read(self) -> bytes:
        return await self._said.get()

    async def write(self, data: bytes) -> None:
        self.heard += data
        if self._greets and data:
            self._greets = False
            self.say(wire.frame(wire.DONE, 1, b"null"))

    async def close(self) -> None:
        self.closed.set()
        self.hang_up()


class Hall(Housing):
    """A house that stands for as long as it is said to."""

    id = "hall"

    def __init__(self, *, rests: bool = False) -> None:
        self.standing = True
        self._rests = rests

    async def pause(self) -> bool:
        return self._rests

    async def resume(self) -> bool:
        return self._rests

    async def alive(self) -> bool:
        return self.standing

    async def end(self) -> None:
        self.standing = False


async def sandbox_over(link: Link, hall: Hall | None = None, *, patience_s: float = 30.0) -> StreamSandbox:
    return await StreamSandbox.over(link, hall or Hall(), Recipe(), patience_s=patience_s)
