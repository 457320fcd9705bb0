"""Streams to and from a twin, in which each side sends no more than the other has allowed."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Callable

from skep.sandbox.sandbox import Stream
from skep.sandbox.twin.conversation import Conversation
from skep.sandbox.twin.inside import wire
from skep.sandbox.twin.inside.wire import Violation

_QUARTER = wire.WINDOW // 4
#: What a command that has ended leaves in its pipe comes without having been allowed.
_REST = 1 << 16


class Inflow(Stream):
    """Bytes from a twin. It sends as much as was read here, and a window ahead."""

    def __init__(self, conversation: Conversation, number: Callable[[], int], stream: int) -> None:
        self._conversation = conversation
        self._number = number
        self._stream = stream
        self._held: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._room = wire.WINDOW + _REST
        self._owed = 0
        self._ended = False

    async def read(self) -> bytes:
        while not self._held and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        return self.read_now()

    def read_now(self) -> bytes:
        if not self._held:
            return b""
        piece = self._held.popleft() if len(self._held) == 1 else self._joined()
        self._owed += len(piece)
        self._room += len(piece)
        if self._owed >= _QUARTER:
            self._conversation.say(wire.CREDIT, self._number(), wire.AMOUNT.pack(self._stream, self._owed))
            self._owed = 0
        return piece

    def _joined(self) -> bytes:
        piece = b"".join(self._held)
        self._held.clear()
        return piece

    def put(self, data: bytes) -> None:
        if self._ended:
            return
        if len(data) > self._room:
            raise Violation("its twin sent more than it was allowed to")
        self._room -= len(data)
        if data:
            self._held.append(data)
        self._arrived.set()

    def end(self) -> None:
        """Let readers come to the end, after what is there."""
        self._ended = True
        self._arrived.set()

    def close(self) -> None:
        """Throw away what is there."""
        self._held.clear()
        self.end()


class Outflow:
    """Bytes to a twin, no more at a time than it can hold."""

    def __init__(self, conversation: Conversation, number: Callable[[], int]) -> None:
        self._conversation = conversation
        self._number = number
        self._room = wire.WINDOW
        self._roomy = asyncio.Event()
        self._turn = asyncio.Lock()
        self.closed = False

    async def write(self, data: bytes) -> None:
        """Hand bytes over; once nobody takes them they are dropped."""
        async with self._turn:
            view = memoryview(data)
            while view and not self.closed:
                if self._room == 0:
                    self._roomy.clear()
                    await self._roomy.wait()
                    continue
                piece = view[: min(self._room, wire.PIECE)]
                self._room -= len(piece)
                self._conversation.say(wire.INPUT, self._number(), bytes(piece))
                view = view[len(piece) :]

    def taken(self, payload: bytes) -> None:
        amount = unpacked(wire.COUNTED, payload)[0]
        if amount > wire.WINDOW - self._room:
            raise Violation("its twin took more than it was given")
        self._room += amount
        self._roomy.set()

    def end(self) -> None:
        """Say that nothing more comes."""
        if not self.closed:
            self._conversation.say(wire.INPUT_END, self._number())
            self.close()

    def close(self) -> None:
        self.closed = True
        self._roomy.set()


class Carried:
    """A socket here whose bytes come from and go to a twin; `end` is the other end of it, for the caller."""

    def __init__(self, inflow: Inflow, outflow: Outflow, *, finished: Callable[[], None]) -> None:
        self.end, self._ours = socket.socketpair()
        self.end.setblocking(False)
        self._ours.setblocking(False)
        self._inflow = inflow
        self._outflow = outflow
        self._finished = finished
        self._pumps = [asyncio.create_task(work) for work in (self._inward(), self._outward())]
        self._left = len(self._pumps)
        for pump in self._pumps:
            pump.add_done_callback(self._pumped)

    def close(self) -> None:
        """Break it off."""
        for pump in self._pumps:
            pump.cancel()

    def _pumped(self, pump: asyncio.Task[None]) -> None:
        self._left -= 1
        if not pump.cancelled():
            pump.exception()
        if self._left == 0:
            self._ours.close()
            self._finished()

    async def _inward(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(self._ours, wire.PIECE):
                await self._outflow.write(data)
        self._outflow.end()
        if _hung_up(self._ours):
            self.close()

    async def _outward(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await self._inflow.read():
                await loop.sock_sendall(self._ours, data)
            self._ours.shutdown(socket.SHUT_WR)
        self._inflow.close()


def _hung_up(end: socket.socket) -> bool:
    """Say whether the other end is closed, and not only done with sending."""
    poll = select.poll()
    poll.register(end, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def unpacked(form: struct.Struct, payload: bytes) -> tuple[int, ...]:
    """Return the numbers of a payload that must have exactly this form."""
    if len(payload) != form.size:
        raise Violation("its twin said something of another length than that has")
    return form.unpack(payload)
