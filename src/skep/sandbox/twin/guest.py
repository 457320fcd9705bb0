"""A guest of a twin: another process that the holder lets use its sandbox. This is the holder's side.

A twin has one stream, which is the holder's. Whoever else uses the sandbox speaks with the holder as with a twin; its
orders go on under numbers of the holder's, and reports come back under its own. What concerns everybody inside is not
passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from skep.errors import SandboxLost
from skep.sandbox.link import Link
from skep.sandbox.twin.conversation import Conversation
from skep.sandbox.twin.inside import wire

_PIECE = 1 << 18
#: Orders that begin something by a new number, and those about something that was begun.
_FIRST = frozenset({wire.START, wire.FILE, wire.WATCH, wire.CONNECT, wire.COUNT, wire.END_MARKED})
_MORE = frozenset({wire.INPUT, wire.INPUT_END, wire.CREDIT, wire.SIGNAL, wire.RESIZE, wire.RELEASE})


class SocketLink(Link):
    """A link over a socket, which it owns."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setblocking(False)
        self._closed = asyncio.Event()

    async def read(self) -> bytes:
        reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._end, _PIECE))
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else b""
        finally:
            for one in (reading, closing):
                one.cancel()

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._end, data)

    async def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)
            await asyncio.sleep(0)  # whoever reads lets go of it first
            self._end.close()


@dataclass(slots=True)
class _Item:
    """Something that the other process has begun, heard of from the twin."""

    guest: TwinGuest
    number: int
    there: int = 0
    runs: bool = False
    released: bool = False

    def hear(self, kind: int, payload: bytes) -> None:
        self.guest.report(self, kind, payload)

    def lose(self) -> None:
        self.guest.hang_up()


class TwinGuest:
    """One other process. `left` is called when it has gone; what it started and still runs is ended then."""

    def __init__(self, conversation: Conversation, end: socket.socket, *, left: Callable[[TwinGuest], None]) -> None:
        self._conversation = conversation
        self._link = SocketLink(end)
        self._items: dict[int, _Item] = {}
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self._say(wire.READY, 0, wire.COUNTED.pack(wire.VERSION))
        self._left = left
        self._serving = asyncio.create_task(self._serve(), name="skep guest")

    def hang_up(self) -> None:
        self._serving.cancel()

    async def close(self) -> None:
        """Hang up, and return when that is done."""
        self._serving.cancel()
        await asyncio.wait([self._serving])

    def report(self, item: _Item, kind: int, payload: bytes) -> None:
        """Pass on what the twin says of something."""
        if kind in (wire.EXITED, wire.REFUSED):
            item.runs = False
        self._say(kind, item.number, payload)
        if item.released and not item.runs:
            self._forget(item)

    def _say(self, kind: int, number: int, payload: bytes = b"") -> None:
        self._said.put_nowait(wire.frame(kind, number, payload))

    async def _serve(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                speaking = group.create_task(self._speak())
                await self._listen()
                speaking.cancel()
        except* (OSError, SandboxLost, wire.Violation):
            pass  # it is gone, or none of ours
        finally:
            self._end_all()
            await self._link.close()
            self._left(self)

    async def _speak(self) -> None:
        while True:
            await self._link.write(await self._said.get())

    async def _listen(self) -> None:
        parser = wire.Parser(wire.ORDER_LIMIT)
        while data := await self._link.read():
            for order in parser.feed(data):
                self._pass_on(order)

    def _pass_on(self, order: wire.Frame) -> None:
        if order.kind == wire.PING:
            self._say(wire.PONG, order.id)
            return
        if order.kind in _FIRST and order.id not in self._items:
            item = _Item(self, order.id, runs=order.kind == wire.START)
            item.there = self._conversation.open(item)
            self._items[order.id] = item
        elif order.kind not in _MORE:
            raise wire.Violation(f"an order of kind {order.kind}")
        if (found := self._items.get(order.id)) is None:
            return  # it has been let go of
        self._conversation.say(order.kind, found.there, order.payload)
        if order.kind == wire.RELEASE:
            found.released = True
            if not found.runs:
                self._forget(found)

    def _forget(self, item: _Item) -> None:
        self._conversation.forget(item.there)
        self._items.pop(item.number, None)

    def _end_all(self) -> None:
        """End what still runs, and let go of everything."""
        for item in list(self._items.values()):
            if item.runs:
                self._conversation.say(wire.SIGNAL, item.there, wire.SIGNALLED.pack(signal.SIGKILL, True, False))
            self._conversation.say(wire.RELEASE, item.there)
            self._forget(item)
