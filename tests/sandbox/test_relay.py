"""A relay carries a program's bytes over connections that are cut wherever it hurts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Callable

from skep.errors import SandboxLost
from skep.sandbox.relay import inside
from skep.sandbox.relay.link import Line, RelayedLink

CAT = ["cat"]


class LossyLine(Line):
    """A line to a relay on this machine that forgets what comes while it is cut, as a cloud does."""

    def __init__(self, chance: random.Random, *, cuts: int) -> None:
        self._chance = chance
        self.cuts = cuts
        self.opened = 0
        self.dropped = 0
        self.taken = 0
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(8)
        self._connected = False
        self._over = False
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    async def start(self, argv: list[str], patience_s: float = 40.0) -> None:
        await self.run(sys.executable, "-I", inside.__file__, str(patience_s), *argv)

    async def run(self, *argv: str) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self._pump = asyncio.ensure_future(self._run())
        self._connected = True

    async def open(self) -> None:
        if self._over:
            raise SandboxLost("the relay has ended", hint="start another")
        self.opened += 1
        self._connected = True

    async def read(self) -> bytes:
        return await self._pieces.get()

    async def write(self, data: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        if not self._connected:
            raise ConnectionError("cut")
        if self._unlucky():
            self._process.stdin.write(data[: self._chance.randrange(len(data))])
            self._cut()
            raise ConnectionError("cut in the middle")
        self._process.stdin.write(data)
        try:
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise SandboxLost("the relay has ended", hint="start another") from error

    async def close(self) -> None:
        self._cut()

    async def end(self) -> None:
        assert self._process is not None and self._pump is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._pump

    def _unlucky(self) -> bool:
        if self.cuts > 0 and self._chance.random() < 0.2:
            self.cuts -= 1
            return True
        return False

    def _cut(self) -> None:
        if self._connected:
            self._connected = False
            self._hurry(b"")

    def _hurry(self, piece: bytes) -> None:
        while self._pieces.full():
            self._pieces.get_nowait()
        self._pieces.put_nowait(piece)

    async def _run(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while data := await self._process.stdout.read(1 << 16):
            self.taken += len(data)
            if not self._connected:
                self.dropped += len(data)
                continue
            if self._unlucky():
                await self._pieces.put(data[: self._chance.randrange(len(data))] or b"\n")
                self._cut()
            else:
                await self._pieces.put(data)
        self._connected, self._over = False, True
        self._hurry(b"")


async def _until(question: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not question():
            await asyncio.sleep(0.01)


async def _collected(link: RelayedLink, size: int) -> bytes:
    found = bytearray()
    while len(found) < size and (piece := await link.read()):
        found += piece
    return bytes(found)


async def test_every_byte_arrives_once_and_in_order_however_often_the_line_is_cut() -> None:
    for seed in range(4):
        line = LossyLine(random.Random(seed), cuts=25)
        await line.start(CAT)
        link = RelayedLink(line)
        data = os.urandom(3 << 20)
        async with asyncio.timeout(30):
            _, found = await asyncio.gather(link.write(data), _collected(link, len(data)))
        assert found == data
        assert line.opened > 5
        await link.close()
        await line.end()


async def test_without_repeating_what_comes_while_the_line_is_cut_is_gone() -> None:
    """The control: the line by itself does lose bytes."""
    line = LossyLine(random.Random(1), cuts=0)
    await line.start(["sh", "-c", "read x; echo gone; read x; echo there; cat"])
    await line.write(b"D 0 1 Cg==\n")
    await line.close()
    assert await line.read() == b""
    await _until(lambda: line.dropped > 0)
    await line.open()
    await line.write(b"D 1 1 Cg==\n")
    assert await line.read() == b"D 1 6 dGhlcmUK\n"
    await line.end()


async def test_the_end_of_the_program_is_the_end_of_the_link() -> None:
    line = LossyLine(random.Random(2), cuts=3)
    await line.start(["sh", "-c", "echo last words"])
    link = RelayedLink(line)
    async with asyncio.timeout(10):
        assert await _collected(link, 1000) == b"last words\n"
        assert await link.read() == b""
    await link.close()
    await line.end()


async def test_a_relay_that_is_killed_ends_the_link() -> None:
    line = LossyLine(random.Random(2), cuts=0)
    await line.start(CAT)
    link = RelayedLink(line)
    await line.end()
    async with asyncio.timeout(2):
        assert await link.read() == b""
    await link.close()


async def test_a_reader_that_does_not_read_stops_the_program_and_fills_no_memory() -> None:
    line = LossyLine(random.Random(3), cuts=0)
    await line.start(["sh", "-c", "yes | head -c 20000000; cat"])
    link = RelayedLink(line)
    await _until(lambda: link._arrived_bytes >= inside.WINDOW_BYTES)
    assert link._arrived_bytes <= 2 * inside.WINDOW_BYTES
    async with asyncio.timeout(30):
        assert len(await _collected(link, 20_000_000)) == 20_000_000
    await link.close()
    await line.end()


async def test_a_controller_that_is_heard_no_more_ends_the_program_unless_it_said_it_would_be_quiet() -> None:
    silent, quiet = (LossyLine(random.Random(4), cuts=0) for _ in range(2))
    await silent.start(CAT, patience_s=0.3)
    await quiet.start(CAT, patience_s=0.3)
    link = RelayedLink(quiet)
    await link.rest()
    async with asyncio.timeout(10):
        while await silent.read():
            pass
        await link.wake()
        await link.write(b"still here?")
        assert await link.read() == b"still here?"
    await link.close()
    await silent.end()
    await quiet.end()


def test_what_was_cut_or_made_up_is_no_message() -> None:
    ledger = inside.Ledger()
    for line in (
        b"",
        b"D",
        b"D 0 3 YWJ",
        b"D 0 4 YWJj",
        b"D 0 3 Y W J j",
        b"D x 3 YWJj",
        b"Q 1",
        b"A",
        b"\xff",
        b"H 1",
    ):
        assert ledger.hear(line) == ("", b"")
    assert ledger.hear(b"D 1 3 YWJj") == ("G", b"")
    assert ledger.hear(b"D 0 3 YWJj") == ("D", b"abc")
    assert ledger.hear(b"D 0 3 YWJj") == ("", b"")


async def test_a_relay_that_asks_and_asks_is_not_answered_each_time() -> None:
    """What it says is hostile: one line of it must not make a megabyte here."""
    asking = "import sys; sys.stdout.buffer.write(b'R 0\\n' * 100000); sys.stdout.flush(); sys.stdin.read()"
    line = LossyLine(random.Random(5), cuts=0)
    await line.run(sys.executable, "-c", asking)
    link = RelayedLink(line)
    await link.write(os.urandom(500_000))
    await _until(lambda: line.taken >= 400_000 and line._pieces.empty())
    assert len(link._out) < 2 * inside.WINDOW_BYTES
    await link.close()
    await line.end()
