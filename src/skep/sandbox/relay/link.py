"""The controller's end of a relay."""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections import deque
from pathlib import Path

from skep.errors import SandboxLost
from skep.sandbox.link import Link
from skep.sandbox.relay import inside
from skep.sandbox.relay.inside import LINE_LIMIT, PIECE_BYTES, WINDOW_BYTES, Ledger

#: The relay ends its program when it has heard nothing for so long; it is told this often that somebody is there.
PATIENCE_S = 40.0
_PING_S = 10.0
#: What is handed to the line at once.
_BATCH_BYTES = 512 << 10
#: How many messages may wait to be read, however small.
_MESSAGES = 200_000
#: How long hanging up may take; whoever does so ends the machine anyhow.
_FAREWELL_S = 2.0
#: Before the next try after one that failed.
_SOON_S, _LATE_S = 0.05, 2.0


def relay_program() -> bytes:
    """Return the program that runs inside: `python3 -I relay.py PATIENCE PROGRAM …`."""
    return Path(inside.__file__).read_bytes()


class Line(abc.ABC):
    """A connection to the standard input and output of a relay, which can be had again after it was lost."""

    @abc.abstractmethod
    async def open(self) -> None:
        """Connect, again if need be; `SandboxLost` when there is nothing to connect to."""

    @abc.abstractmethod
    async def read(self) -> bytes:
        """Return the next bytes; nothing when the connection is lost."""

    @abc.abstractmethod
    async def write(self, data: bytes) -> None:
        """Hand bytes over; `ConnectionError` when the connection is lost, also in the middle of them."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let the connection go. Safe to repeat."""


class RelayedLink(Link):
    """A byte stream to a program behind a relay. It ends when the program does, or `Line.open` says that it has."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._ledger = Ledger()
        self._arrived: deque[bytes] = deque()
        self._arrived_bytes = 0
        self._out = bytearray()
        self._ended = False
        self._resting = False
        self._changed = asyncio.Condition()
        self._connected = asyncio.Event()
        self._writing = asyncio.Lock()
        self._carriers = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._talk())]

    async def read(self) -> bytes:
        async with self._changed:
            await self._changed.wait_for(lambda: self._arrived or self._ended)
            if not self._arrived:
                return b""
            data = self._arrived.popleft()
            self._arrived_bytes -= len(data)
            self._out += self._ledger.dealt(len(data))
            self._changed.notify_all()
            return data

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            async with self._changed:
                await self._changed.wait_for(lambda: self._ended or not self._ledger.full)
                if self._ended:
                    raise ConnectionError("the program behind the relay has ended")
                self._out += self._ledger.say(data[start : start + PIECE_BYTES])
                self._changed.notify_all()

    async def rest(self) -> None:
        """Prepare for a halt of the machine: its silence, and ours, mean nothing until `wake`."""
        async with self._writing:
            await self._line.write(b"\nH\n")
            self._resting = True
        self._connected.clear()
        await self._line.close()

    async def wake(self) -> None:
        """Connect again and catch up; `SandboxLost` when there is nobody."""
        async with self._changed:
            self._resting = False
            self._changed.notify_all()
        await self._connected.wait()
        if self._ended:
            raise SandboxLost("the program behind the relay is no more", hint="start another sandbox")

    async def close(self) -> None:
        heard = not self._ended and not self._resting
        await self._end()  # first, so that nobody connects again to what is about to end
        if heard:
            with contextlib.suppress(ConnectionError, SandboxLost, TimeoutError):
                async with asyncio.timeout(_FAREWELL_S), self._writing:
                    await self._line.write(bytes(self._out) + self._ledger.say(b""))
        for task in self._carriers:
            task.cancel()
        await asyncio.gather(*self._carriers, return_exceptions=True)
        await self._line.close()

    async def _listen(self) -> None:
        rest = b""
        try:
            while not self._ended:
                piece = await self._line.read()
                if not piece:
                    rest = b""
                    await self._reconnect()
                    continue
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > LINE_LIMIT:
                    return
                await self._take_in(lines)
        except SandboxLost:
            return
        finally:
            await self._end()

    async def _take_in(self, lines: list[bytes]) -> None:
        async with self._changed:
            kinds = {self._heard(line) for line in lines}
            if kinds & {"G", "R"}:  # once for all of them: it is not for the relay to say how often
                self._repeat()
            # A relay sends no more than was asked for; what does is none.
            if self._arrived_bytes > 2 * WINDOW_BYTES or len(self._arrived) > _MESSAGES:
                self._ended = True
            self._changed.notify_all()

    def _heard(self, line: bytes) -> str:
        kind, data = self._ledger.hear(line)
        if kind == "D":
            self._arrived.extend([data] if data else [])
            self._arrived_bytes += len(data)
            self._ended = self._ended or not data
        return kind

    async def _reconnect(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._resting or self._ended)
        if self._ended:
            return
        await self._line.open()
        self._connected.set()
        async with self._changed:
            self._repeat()

    def _repeat(self) -> None:
        """Have said again, both ways, what may have been lost."""
        self._out[:] = self._ledger.ask() + self._ledger.again()
        self._changed.notify_all()

    async def _talk(self) -> None:
        delay_s = _SOON_S
        while not self._ended:
            async with self._changed:
                await self._something_to_say()
                batch = bytes(self._out[:_BATCH_BYTES]) or b"P\n"
                del self._out[:_BATCH_BYTES]
            try:
                async with self._writing:
                    if not self._resting:
                        await self._line.write(batch)
                delay_s = _SOON_S
            except ConnectionError:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LATE_S)
                async with self._changed:
                    self._repeat()
            except SandboxLost:
                await self._end()

    async def _something_to_say(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PING_S):
                await self._changed.wait_for(lambda: self._out or self._ended)
        await self._changed.wait_for(lambda: self._ended or not self._resting)

    async def _end(self) -> None:
        async with self._changed:
            self._ended = True
            self._connected.set()
            self._changed.notify_all()
