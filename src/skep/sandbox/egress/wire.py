"""The two ends of a connection as the proxy holds them, and moving bytes between them."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from skep.sandbox.egress.http import HEAD_LIMIT, Answer, Framing, Head, Malformed, parse_answer, parse_head

_PIECE = 64 << 10
_LINE_LIMIT = 1024
#: How many pieces one connection may move before others get their turn.
_TURN = 8
_FAREWELL_S = 1.0
_FAREWELL_BYTES = 4 << 20


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
    def end(self) -> None:
        """Say that nothing more will be written, where that can be said without closing."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def abort(self) -> None:
        """Close without saying what is still to be said."""
        self.close()

    @property
    @abc.abstractmethod
    def is_over(self) -> bool:
        """Say whether the other side has closed it already, or says what nobody asked for."""

    @property
    @abc.abstractmethod
    def has_ended(self) -> bool:
        """Say whether the other side will say nothing more, and has said nothing that is unread."""

    async def read(self) -> bytes:
        ahead, self._ahead = self._ahead, b""
        return ahead or await self._pull()

    async def head(self) -> Head | None:
        """Read the head of the next request; None when there is no other."""
        block = await self._until(b"\r\n\r\n", HEAD_LIMIT)
        return parse_head(block) if block else None

    async def answer(self) -> Answer | None:
        """Read the head of the next answer; None when there is no other."""
        block = await self._until(b"\r\n\r\n", HEAD_LIMIT)
        return parse_answer(block) if block else None

    async def wait(self) -> bool:
        """Wait for more to read; False when there is no more."""
        if not self._ahead:
            self._ahead = await self._pull()
        return bool(self._ahead)

    async def take(self, size: int) -> bytes:
        """Read at most so many bytes."""
        data = await self.read()
        self._ahead = data[size:]
        return data[:size]

    async def exactly(self, size: int) -> bytes:
        """Read so many bytes; fewer only at the end."""
        data = b""
        while len(data) < size and (more := await self.take(size - len(data))):
            data += more
        return data

    async def line(self) -> bytes:
        return await self._until(b"\r\n", _LINE_LIMIT)

    def drain(self) -> bytes:
        """Return what was read too far."""
        ahead, self._ahead = self._ahead, b""
        return ahead

    async def bid_farewell(self, message: bytes) -> None:
        """Say a last message and take what is still coming: to close on unread bytes would throw the message away."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_FAREWELL_S):
                await self.write(message)
                self.end()
                left = _FAREWELL_BYTES
                while left > 0 and (data := await self.read()):
                    left -= len(data)

    async def _until(self, mark: bytes, limit: int) -> bytes:
        data = bytearray(await self.read())
        seen = 0
        while (end := data.find(mark, seen)) < 0:
            if len(data) > limit:
                raise Malformed("the head or a line of the message is too long")
            seen = max(0, len(data) - len(mark) + 1)
            more = await self._pull()
            if not more:
                if data:
                    raise Malformed("the message was cut off")
                return b""
            data += more
        if end > limit:
            raise Malformed("the head or a line of the message is too long")
        self._ahead = bytes(data[end + len(mark) :])
        return bytes(data[: end + len(mark)])


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

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()

    @property
    def is_over(self) -> bool:
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return bool(self._ahead)
        except OSError:
            return True
        return True

    @property
    def has_ended(self) -> bool:
        try:
            return not self._ahead and not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


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

    def end(self) -> None:
        """TLS has no half-closed connections here."""

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()

    @property
    def is_over(self) -> bool:
        return self.has_ended

    @property
    def has_ended(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()


#: Looks at each piece and returns what goes on.
Look = Callable[[bytes], bytes]
#: Hears how many bytes were moved.
Count = Callable[[int], None]
Send = Callable[[bytes], Awaitable[None]]


async def pump(source: Wire, target: Wire, seen: Look) -> None:
    """Carry bytes one way to the end; `seen` looks at each piece and returns what goes on."""
    turn = 0
    while data := await source.read():
        if passed := seen(data):
            await target.write(passed)
        turn = await _give_way(turn)


async def relay(source: Wire, target: Wire, count: Count, left: int | None = None) -> None:
    """Carry bytes one way unread: so many, or all to the end."""
    if not isinstance(source, SocketWire) or not isinstance(target, SocketWire):
        await _relay_by_piece(source, target, count, left)
        return
    if ahead := source.drain():
        first = ahead if left is None else ahead[:left]
        source._ahead = ahead[len(first) :]
        count(len(first))
        await target.write(first)
        left = None if left is None else left - len(first)
    await _relay_by_kernel(source.sock, target.sock, count, left)


async def _relay_by_piece(source: Wire, target: Wire, count: Count, left: int | None) -> None:
    turn = 0
    while left is None or left > 0:
        data = await (source.read() if left is None else source.take(left))
        if not data:
            break
        count(len(data))
        await target.write(data)
        left = None if left is None else left - len(data)
        turn = await _give_way(turn)
    if left:
        raise Malformed("the body was cut off")


#: One for all connections: what is in it is sent or copied before anybody else can run.
_BUFFER = memoryview(bytearray(256 << 10))


async def _relay_by_kernel(source: socket.socket, target: socket.socket, count: Count, left: int | None) -> None:
    loop, turn = asyncio.get_running_loop(), 0
    while left is None or left > 0:
        try:
            size = source.recv_into(_BUFFER, len(_BUFFER) if left is None else min(left, len(_BUFFER)))
        except BlockingIOError:
            await readable(source)
            continue
        if not size:
            break
        try:
            sent = target.send(_BUFFER[:size])
        except BlockingIOError:
            sent = 0
        rest = bytes(_BUFFER[sent:size])
        count(size)
        if rest:
            await loop.sock_sendall(target, rest)
        left = None if left is None else left - size
        turn = await _give_way(turn)
    if left:
        raise Malformed("the body was cut off")


async def _give_way(turn: int) -> int:
    if turn < _TURN:
        return turn + 1
    await asyncio.sleep(0)
    return 0


async def body(wire: Wire, framing: Framing) -> AsyncIterator[bytes]:
    """Yield what is in a body, whichever way it ends."""
    if framing == "chunks":
        async for piece in chunks(wire):
            yield piece
        return
    left = framing if isinstance(framing, int) else None
    while left is None or left > 0:
        piece = await (wire.read() if left is None else wire.take(left))
        if not piece:
            if left:
                raise Malformed("the body was cut off")
            return
        left = None if left is None else left - len(piece)
        yield piece


async def chunks(wire: Wire) -> AsyncIterator[bytes]:
    """Yield what is in the chunks of a body. Their extensions and what trails them goes no further."""
    while True:
        line = await wire.line()
        digits = line[:-2].partition(b";")[0].rstrip(b" \t")
        if not digits or len(digits) > 8 or digits.strip(b"0123456789abcdefABCDEF"):
            raise Malformed("a chunk has no length")
        left = int(digits, 16)
        if left == 0:
            break
        while left:
            piece = await wire.take(left)
            if not piece:
                raise Malformed("the body was cut off")
            left -= len(piece)
            yield piece
        if await wire.line() != b"\r\n":
            raise Malformed("a chunk is longer than its length")
    for _ in range(100):
        if await wire.line() in (b"\r\n", b""):
            return
    raise Malformed("too much trails the body")


async def carry_chunks(wire: Wire, send: Send) -> None:
    """Carry a body that comes in chunks, written anew: both sides agree where it ends."""
    async for piece in chunks(wire):
        await send(chunk(piece))
    await send(LAST_CHUNK)


LAST_CHUNK = b"0\r\n\r\n"


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


_SPURIOUS_S = 0.01


async def peek(sock: socket.socket, enough: Callable[[bytes], bool], limit: int = 17 << 10) -> bytes:
    """Look at the first bytes without taking them, until there are enough or no more come."""
    data, wanted = b"", 1
    try:
        while True:
            try:
                before, data = data, sock.recv(limit, socket.MSG_PEEK)
            except BlockingIOError:
                await readable(sock)
                continue
            if len(data) >= limit or enough(data) or not data:
                return data
            if len(data) == len(before):
                if has_ended(sock):
                    return data
                await asyncio.sleep(_SPURIOUS_S)  # woken for nothing, as the kernel may when memory is short
            # The kernel wakes us only when there is more than we have seen.
            wanted = len(data) + 1
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            await readable(sock)
    finally:
        if wanted > 1:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def has_ended(sock: socket.socket) -> bool:
    """Say whether the other side will send no more."""
    ended = select.poll()
    ended.register(sock, select.POLLRDHUP)
    return bool(ended.poll(0))


async def readable(*socks: socket.socket) -> socket.socket:
    """Wait until one of some sockets has something to read, or its end; return it."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[socket.socket] = loop.create_future()

    def tell(sock: socket.socket) -> None:
        if not ready.done():
            ready.set_result(sock)

    for sock in socks:
        loop.add_reader(sock, tell, sock)
    try:
        return await ready
    finally:
        for sock in socks:
            loop.remove_reader(sock)
