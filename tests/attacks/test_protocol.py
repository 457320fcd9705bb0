"""What a hostile agent can say to the controller, and hostile orders to the agent.

A fake agent speaks on the other end of the socket. Every lie comes with the truth as its control: the same record,
well formed and at the right moment, is believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Sequence

import pytest

from skep.errors import LimitReached, SandboxLost
from skep.sandbox.agent import DONE, EXITED, PAUSE, READY, REFUSED, SPAWN, STARTED, Agent, Report, Spawn
from skep.sandbox.bubblewrap import BubblewrapSandbox
from skep.sandbox.sandbox import Sandbox

SIZE = struct.calcsize("=IIiiQQQ")
TRUE = Spawn(argv=["/bin/true"], env={}, cwd="/")


def record(kind: int, order_id: int, a: int = 0, b: int = 0, use: int = 0) -> bytes:
    return struct.pack("=IIiiQQQ", kind, order_id, a, b, use, use, use)


class Liar:
    """The other end of a controller's conversation."""

    def __init__(self) -> None:
        ours, self._control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self.agent = Agent(ours)
        self.ends: list[Report | None] = []

    async def asked(self) -> int:
        """Return the number of the next order."""
        data = await asyncio.get_running_loop().sock_recv(self._control, 64)
        return int(struct.unpack_from("=II", data)[1])

    def say(self, data: bytes, fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(self._control, [data], list(fds))

    def spawning(self, terminal: tuple[int, int] | None = None) -> asyncio.Task[Report]:
        return asyncio.create_task(self.agent.spawn(TRUE, self.ends.append, terminal=terminal))

    def close(self) -> None:
        self.agent.close()
        self._control.close()


@pytest.fixture
async def liar(no_descriptor_is_left: None) -> AsyncIterator[Liar]:
    made = Liar()
    yield made
    made.close()


async def _heard(liar: Liar) -> None:
    """Wait until the controller has taken all that was said."""
    order = asyncio.create_task(liar.agent.ask(PAUSE))
    liar.say(record(DONE, await liar.asked()))
    await asyncio.wait_for(order, 5)


@pytest.mark.parametrize(
    "lie",
    [
        lambda n: record(99, n), lambda n: record(0, n), lambda n: record(DONE, n), lambda n: record(READY, n),
        lambda n: record(EXITED, n), lambda n: record(STARTED, n)[:-1], lambda n: record(STARTED, n) + b"\0",
        lambda n: record(STARTED, n) * 1000, lambda n: b"x", lambda n: record(1 << 31, n),
    ],
    ids=["unknown kind", "kind 0", "an answer to something else", "ready again", "ended before it started", "cut short",
         "one byte more", "40 kB", "one byte", "kind with the highest bit"],
)  # fmt: skip
async def test_a_malformed_answer_ends_the_conversation(lie: object, liar: Liar) -> None:
    assert callable(lie)
    honest = liar.spawning()
    liar.say(record(STARTED, await liar.asked(), 7))
    assert (await asyncio.wait_for(honest, 5)).a == 7
    deceived = liar.spawning()
    liar.say(lie(await liar.asked()))
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(deceived, 5)
    assert liar.agent.lost.is_set()
    assert liar.ends in ([None], [None, None])


async def test_an_unknown_kind_for_nobody_ends_the_conversation_too(liar: Liar) -> None:
    await _heard(liar)
    liar.say(record(77, 12345))
    await asyncio.wait_for(liar.agent.lost.wait(), 5)


async def test_an_end_is_believed_once_and_only_of_what_was_started(liar: Liar) -> None:
    started = liar.spawning()
    number = await liar.asked()
    liar.say(record(STARTED, number))
    await started
    for other in (0, 1, number + 1, 2**32 - 1):
        liar.say(record(EXITED, other))
    await _heard(liar)
    assert liar.ends == []
    liar.say(record(EXITED, number, 3))
    liar.say(record(EXITED, number, 4))
    await _heard(liar)
    assert [end.a for end in liar.ends if end] == [3]


async def test_a_second_start_changes_nothing(liar: Liar) -> None:
    started = liar.spawning()
    number = await liar.asked()
    liar.say(record(STARTED, number, 5))
    liar.say(record(STARTED, number, 6))
    assert (await started).a == 5
    await _heard(liar)


@pytest.mark.parametrize("kind", [STARTED, REFUSED, DONE, EXITED, READY])
async def test_descriptors_that_nobody_asked_for_are_closed(kind: int, liar: Liar) -> None:
    """A receiver that takes what it is sent ends with all of them, until it can open nothing more."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open("/dev/null") as file:
        socket.send_fds(theirs, [record(kind, 1)], [file.fileno()] * 30)
        _, taken, _, _ = socket.recv_fds(ours, SIZE, 64)
        assert len(taken) == 30
        for fd in taken:
            os.close(fd)
        started = liar.spawning()
        number = await liar.asked()
        liar.say(record(STARTED, number), [file.fileno()] * 30)
        await started
        for _ in range(20):
            liar.say(record(kind, 0 if kind == READY else 4321), [file.fileno()] * 30)
        liar.say(record(EXITED, number), [file.fileno()])
        await _heard(liar)
        if kind == READY:
            os.close(await liar.agent.ready())  # the first of them was the answer
    # The fixture counts what is left.


async def test_descriptors_of_an_agent_go_to_no_child(liar: Liar) -> None:
    """Python marks what it opens, not what it is sent."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open("/dev/null") as file:
        socket.send_fds(theirs, [b"x"], [file.fileno()])
        _, (taken,), _, _ = socket.recv_fds(ours, 1, 1)
        assert os.get_inheritable(taken)
        os.close(taken)
        liar.say(record(READY, 0), [file.fileno()])
        root = await liar.agent.ready()
        assert not os.get_inheritable(root)
        os.close(root)


async def test_a_terminal_without_its_descriptor_is_an_error_and_is_ended(liar: Liar) -> None:
    started = liar.spawning(terminal=(24, 80))
    number = await liar.asked()
    liar.say(record(STARTED, number))
    with pytest.raises(LimitReached):
        await asyncio.wait_for(started, 5)
    assert await liar.asked() == number  # the signal


async def test_numbers_from_an_agent_are_labels(liar: Liar) -> None:
    """The largest and the least are taken as they are, and nothing is computed from them that could fail."""
    for extreme in (2**31 - 1, -(2**31)):
        started = liar.spawning()
        number = await liar.asked()
        liar.say(record(STARTED, number, extreme))
        assert (await started).a == extreme
        liar.say(record(EXITED, number, extreme, extreme, 2**64 - 1))
    await _heard(liar)
    assert [end.b for end in liar.ends if end] == [2**31 - 1, -(2**31)]


async def test_a_flood_of_records_leaves_room_for_others(liar: Liar) -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    said = 0
    with contextlib.suppress(BlockingIOError):
        while said < 100_000:
            liar.say(record(EXITED, 999))
            said += 1
    assert said > 64
    await _heard(liar)
    beside.cancel()
    assert turns > said // 64


async def test_an_agent_that_goes_ends_every_wait(liar: Liar) -> None:
    waits = [liar.spawning(), asyncio.create_task(liar.agent.ask(PAUSE)), asyncio.create_task(liar.agent.ready())]
    await liar.asked()
    liar.close()
    for wait in waits:
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(wait, 5)


def _payload(argc: int, envc: int, limits: int, rest: bytes) -> bytes:
    return struct.pack("=IIII", argc, envc, limits, 0) + rest


@pytest.mark.parametrize(
    "payload",
    [b"", b"\0" * 15, _payload(0, 0, 0, b"/\0"), _payload(1, 0, 0, b"/\0"), _payload(1, 0, 0, b"/\0/bin/true"),
     _payload(2**32 - 1, 2**32 - 1, 0, b"/\0a\0"), _payload(1 << 20, 1 << 20, 0, b"/\0a\0"),
     _payload(1, 0, 17, b"/\0/bin/true\0"), _payload(1, 0, 16, b"/\0/bin/true\0"), _payload(1, 2**31, 0, b"/\0a\0")],
    ids=["empty", "short", "no arguments", "fewer than said", "no end", "more than there are", "a million",
         "too many limits", "limits past the end", "environment past the end"],
)  # fmt: skip
async def test_a_hostile_order_is_refused_by_the_agent(payload: bytes, sandbox: Sandbox) -> None:
    """The agent reads what it is handed as if it came from somebody else."""
    assert isinstance(sandbox, BubblewrapSandbox)
    null = os.open("/dev/null", os.O_RDWR)
    memory = os.memfd_create("hostile")
    try:
        os.write(memory, payload)
        answer = await asyncio.wait_for(sandbox._agent.ask(SPAWN, 0, 0, 0, fds=[memory, null, null, null]), 5)
    finally:
        os.close(memory)
        os.close(null)
    assert answer.kind == REFUSED
    assert (await sandbox.run(["/bin/true"])).ok
