"""The two ends of a connection as the proxy holds them, and moving bytes between them."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import socket
from collections.abc import Callable

from skep.sandbox.egress.http import HEAD_LIMIT, Head, Malformed, parse_head

_PIECE = 256 << 10


class Wire(abc.ABC):
    """A connection with a small buffer for what was read too far."""

    def __init__(self) -> None:
        self._ahead = b""

    @abc.abstractmethod
    async def _pull(self) -> bytes:
        """Return the next bytes, nothing at the end."""

    @abc.abstractmethod
    async def write(self, data: bytes) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    async def read(self) -> bytes:
        ahead, self._ahead = self._ahead, b""
        return ahead or await self._pull()

    async def head(self) -> Head | None:
        """Read the head of the next request; None when there is no other."""
        block = await self._until(b"\r\n\r\n", HEAD_LIMIT)
        return parse_head(block) if block else None

    async def take(self, size: int) -> bytes:
        """Read at most so many bytes."""
        data = await self.read()
        self._ahead = data[size:]
        return data[:size]

    async def line(self) -> bytes:
        return await self._until(b"\r\n", 1024)

    async def _until(self, mark: bytes, limit: int) -> bytes:
        data = await self.read()
        while (end := data.find(mark)) < 0:
            if len(data) > limit:
                raise Malformed("the request is too long")
            more = await self._pull()
            if not more:
                if data:
                    raise Malformed("the request was cut off")
                return b""
            data += more
        self._ahead = data[end + len(mark) :]
        return data[: end + len(mark)]


class SocketWire(Wire):
    """A plain connection."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def _pull(self) -> bytes:
        return await self._loop.sock_recv(self.sock, _PIECE)

    async def write(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    def close(self) -> None:
        self.sock.close()


class StreamWire(Wire):
    """A connection with TLS on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._reader, self._writer = reader, writer

    async def _pull(self) -> bytes:
        return await self._reader.read(_PIECE)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._writer.close()


async def pump(source: Wire, target: Wire, seen: Callable[[bytes], bytes]) -> None:
    """Carry bytes one way to the end; `seen` looks at each piece and returns what goes on."""
    while data := await source.read():
        if passed := seen(data):
            await target.write(passed)


async def peek(sock: socket.socket, enough: Callable[[bytes], bool], limit: int = 17 << 10) -> bytes:
    """Look at the first bytes without taking them, until there are enough or no more come."""
    loop = asyncio.get_running_loop()
    data, wanted = b"", 1
    while True:
        # The kernel wakes us only when there is more than we have seen.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
        await _readable(loop, sock)
        before, data = data, sock.recv(limit, socket.MSG_PEEK)
        if not data or len(data) == len(before) or len(data) >= limit or enough(data):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return data
        wanted = len(data) + 1


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
