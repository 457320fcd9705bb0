"""Moving bytes between two connections: whole, bounded, and in turn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as some

from skep.sandbox.egress.http import Framing, Malformed
from skep.sandbox.egress.wire import SocketWire, Wire, body, carry_chunks, chunks, peek, relay


class Told(Wire):
    """A wire that says given pieces and keeps what is written to it."""

    def __init__(self, *pieces: bytes) -> None:
        super().__init__()
        self._pieces = [piece for piece in pieces if piece]
        self.written = b""

    async def _pull(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def write(self, data: bytes) -> None:
        self.written += data

    def end(self) -> None: ...

    def close(self) -> None: ...

    @property
    def is_over(self) -> bool:
        return not self._pieces

    has_ended = is_over


def pieces_of(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


async def read(wire: Wire, framing: Framing) -> bytes:
    return b"".join([piece async for piece in body(wire, framing)])


SIZES = some.lists(some.integers(1, 8), max_size=60)


@given(some.lists(some.binary(min_size=1, max_size=20), max_size=5), SIZES)
def test_chunks_are_read_however_they_arrive_and_written_alike(parts: list[bytes], sizes: list[int]) -> None:
    data = b"".join(b"%X ;ext=1\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nTrailer: 1\r\n\r\nNEXT"
    told, target = Told(*pieces_of(data, sizes)), Told()
    asyncio.run(carry_chunks(told, target.write))
    assert asyncio.run(read(Told(target.written), "chunks")) == b"".join(parts)
    assert b"ext" not in target.written
    assert b"Trailer" not in target.written
    assert asyncio.run(told.exactly(4)) == b"NEXT"


@pytest.mark.parametrize(
    "data",
    [b"", b"zz\r\n", b"\r\n", b"-1\r\n", b"+5\r\nhello\r\n", b"0x5\r\nhello\r\n",
     b"5\r\nhelloXX0\r\n\r\n", b"5\r\nhel", b"5\nhello\n",
     b"123456789\r\n", b"5;" + b"x" * 2000 + b"\r\n", b"0\r\n" + b"T: 1\r\n" * 200],
)  # fmt: skip
def test_chunks_that_do_not_add_up_are_refused(data: bytes) -> None:
    async def drain() -> None:
        async for _ in chunks(Told(data)):
            pass

    with pytest.raises(Malformed):
        asyncio.run(drain())


@given(some.binary(max_size=50), some.integers(0, 50), SIZES)
def test_a_length_takes_so_much_and_no_more(data: bytes, length: int, sizes: list[int]) -> None:
    told = Told(*pieces_of(data, sizes))
    if length > len(data):
        with pytest.raises(Malformed):
            asyncio.run(read(told, length))
    else:
        assert asyncio.run(read(told, length)) == data[:length]
        assert asyncio.run(told.exactly(len(data))) == data[length:]


def test_a_head_that_does_not_end_is_refused_in_bounds() -> None:
    endless = Told(*[b"X" * 60_000] * 100)
    with pytest.raises(Malformed):
        asyncio.run(endless.head())
    assert len(endless._pieces) > 90
    with pytest.raises(Malformed):
        asyncio.run(Told(b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n").head())


def test_a_head_that_is_cut_off_is_refused() -> None:
    with pytest.raises(Malformed):
        asyncio.run(Told(b"GET / HTTP/1.1\r\nHost: a").head())
    assert asyncio.run(Told().head()) is None


@pytest.fixture
async def pair() -> AsyncIterator[tuple[socket.socket, SocketWire]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    theirs.setblocking(False)
    yield ours, SocketWire(theirs)
    ours.close()
    theirs.close()


async def test_a_relay_carries_more_than_the_kernel_holds() -> None:
    (first, source), (target, last) = socket.socketpair(), socket.socketpair()
    data = bytes(range(256)) * 20_000
    for sock in (first, source, target, last):
        sock.setblocking(False)
    loop, moved, heard = asyncio.get_running_loop(), [0], bytearray()

    async def listen() -> None:
        while len(heard) < len(data):
            heard.extend(await loop.sock_recv(last, 65536))

    def count(size: int) -> None:
        moved[0] += size

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(loop.sock_sendall(first, data + b"more"))
        group.create_task(listen())
        group.create_task(relay(SocketWire(source), SocketWire(target), count, len(data)))
    assert bytes(heard) == data
    assert moved[0] == len(data)
    assert source.recv(10) == b"more"
    for sock in (first, source, target, last):
        sock.close()


async def test_a_peek_takes_nothing(pair: tuple[socket.socket, SocketWire]) -> None:
    ours, wire = pair
    ours.sendall(b"one")
    asyncio.get_running_loop().call_later(0.01, ours.sendall, b" two")
    async with asyncio.timeout(5):
        assert await peek(wire.sock, lambda data: b"two" in data) == b"one two"
    assert await wire.read() == b"one two"


async def test_a_farewell_is_heard_over_what_is_still_being_said() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    accepted.setblocking(False)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    talking = asyncio.ensure_future(loop.sock_sendall(client, bytes(3 << 20)))
    wire = SocketWire(accepted)
    farewell = asyncio.ensure_future(wire.bid_farewell(b"no"))
    await talking
    client.shutdown(socket.SHUT_WR)
    await farewell
    wire.close()
    assert await loop.sock_recv(client, 10) == b"no"
    client.close()
    server.close()


async def test_a_wire_knows_that_the_other_side_has_gone(pair: tuple[socket.socket, SocketWire]) -> None:
    ours, wire = pair
    assert state(wire) == (False, False)
    ours.sendall(b"unasked")
    assert await wire.wait()
    assert state(wire) == (True, False)
    assert await wire.read() == b"unasked"
    ours.close()
    assert state(wire) == (True, True)


def state(wire: Wire) -> tuple[bool, bool]:
    return wire.is_over, wire.has_ended
