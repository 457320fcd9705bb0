"""One of the two ends of a visit: a socket, read piece by piece, with what was read too far kept for later."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from skep.sandbox.egress.http import HEAD_LIMIT, Head, Malformed, parse_head

_READ = 256 << 10
_WRITE = 64 << 10
_LINE_LIMIT = 1024
_END = b"\r\n\r\n"

Send = Callable[[bytes], Awaitable[None]]


class Wire:
    """A socket that does not block. `moved` is called whenever bytes pass."""

    def __init__(self, sock: socket.socket, moved: Callable[[], None]) -> None:
        self._sock = sock
        self._moved = moved
        self._ahead = b""
        self._loop = asyncio.get_running_loop()

    async def read(self) -> bytes:
        """Return the next bytes, nothing at the end."""
        ahead, self._ahead = self._ahead, b""
        return ahead or await self._pull()

    async def take(self, size: int) -> bytes:
        """Return at most so many of the next bytes."""
        data = await self.read()
        self._ahead = data[size:]
        return data[:size]

    async def write(self, data: bytes) -> None:
        # Piece by piece: a reader that is slow but reads is not silent.
        view = memoryview(data)
        for start in range(0, len(view), _WRITE):
            await self._loop.sock_sendall(self._sock, view[start : start + _WRITE])
            self._moved()

    async def ready(self) -> bool:
        """Wait for the next bytes without taking them; say whether there are any."""
        if not self._ahead:
            self._ahead = await self._pull()
        return bool(self._ahead)

    async def head(self) -> Head | None:
        """Read the head of the next request; None when there is no other."""
        block = await self._until(_END, HEAD_LIMIT)
        if block and not block.endswith(_END):
            raise Malformed("the request is cut off or too long")
        return parse_head(block) if block else None

    async def answer_head(self) -> bytes:
        """Read to the end of an answer's head, or as far as it makes sense to look for one."""
        return await self._until(_END, HEAD_LIMIT)

    async def line(self) -> bytes:
        return await self._until(b"\r\n", _LINE_LIMIT)

    def usable(self) -> bool:
        """Say whether a request can go here: it is not at its end, and holds no bytes that nobody asked for."""
        if self._ahead:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def end(self) -> None:
        """Say that nothing more will be written."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()

    async def _pull(self) -> bytes:
        await asyncio.sleep(0)  # a fast stream never has to wait, and would keep the loop to itself
        data = await self._loop.sock_recv(self._sock, _READ)
        self._moved()
        return data

    async def _until(self, mark: bytes, limit: int) -> bytes:
        """Read to the end of a mark; less if there is none within the limit, or before the end."""
        data = await self.read()
        while (end := data.find(mark, 0, limit)) < 0 and len(data) < limit:
            more = await self._pull()
            if not more:
                return data
            data += more
        cut = end + len(mark) if end >= 0 else len(data)
        self._ahead = data[cut:]
        return data[:cut]


async def carry_bytes(source: Wire, count: int, send: Send) -> None:
    """Carry so many bytes."""
    while count:
        piece = await source.take(count)
        if not piece:
            raise Malformed("the body was cut off")
        count -= len(piece)
        await send(piece)


async def carry_chunks(source: Wire, send: Send) -> None:
    """Carry a body that comes in chunks, checking where it ends: what comes next starts there."""
    while True:
        line = await source.line()
        digits = line[:-2].split(b";")[0].strip(b" \t")
        if not line.endswith(b"\r\n") or not 0 < len(digits) <= 8 or digits.strip(b"0123456789abcdefABCDEF"):
            raise Malformed("a chunk has no length")
        await send(line)
        if int(digits, 16) == 0:
            break
        await carry_bytes(source, int(digits, 16), send)
        if await source.line() != b"\r\n":
            raise Malformed("a chunk is longer than its length")
        await send(b"\r\n")
    while (line := await source.line()) != b"\r\n":
        if not line.endswith(b"\r\n"):
            raise Malformed("the body was cut off")
        await send(line)
    await send(b"\r\n")


async def carry_rest(source: Wire, target: Wire) -> None:
    """Carry everything to the end."""
    while piece := await source.read():
        await target.write(piece)


async def join(one: Wire, other: Wire) -> None:
    """Carry both directions as they are, each to its own end."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_carry_to_end(one, other))
            group.create_task(_carry_to_end(other, one))
    except* OSError:
        pass  # one side broke off, which ends both


async def _carry_to_end(source: Wire, target: Wire) -> None:
    await carry_rest(source, target)
    target.end()
