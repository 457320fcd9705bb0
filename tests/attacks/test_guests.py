"""What a guest can do to the agent, to the holder and to other guests with orders that it should not give.

A guest is a process of the same user that the holder let in, and may still be broken. As its control, each attempt is
made by the holder itself, or against an agent with the protection taken away.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tests.attacks.attack import DEADLINE_S, IS_ROOT, Weakened, soon

from skep.sandbox.agent import (
    ADMIT,
    BEGIN,
    CONNECT,
    DONE,
    HOLD,
    JOIN,
    LAUNCH,
    NETWORK,
    OPEN,
    PAUSE,
    READY,
    REFUSED,
    RELEASE,
    RESUME,
    SIGNAL,
    SPAWN,
    STARTED,
    Report,
    Spawn,
    order,
)
from skep.sandbox.bubblewrap import BubblewrapSandbox
from skep.sandbox.sandbox import Sandbox

REPORT = struct.Struct("=IIiiQQQ")
#: Agents that wait for guests to read, that believe what a guest may still change, that keep what they are sent.
PATIENT = Weakened(agent=(("MSG_NOSIGNAL | (to == &first ? 0 : MSG_DONTWAIT)", "MSG_NOSIGNAL"),))
TRUSTING = Weakened(agent=(("from_guest ? fcntl(fd, F_GET_SEALS) : ", "from_guest ? 0xff : "),))
HOARDING = Weakened(
    agent=(
        (
            "        else obey_guest(from, &o);\n    }\n    close_all(fds, count);",
            "        else obey_guest(from, &o);\n    }\n",
        ),
    )
)


class Guest:
    """A guest that sends what it likes."""

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self._control = control
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def admitted(cls, holder: Sandbox) -> Guest:
        guest = cls(await holder.admit())
        assert (await guest.hear()).kind == READY
        return guest

    def say(self, record: bytes, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._control, [record], list(fds))

    async def hear(self) -> Report:
        """Return the next report; a guest that was dropped hears an `EOFError`."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    data, fds, _, _ = socket.recv_fds(self._control, REPORT.size, 8)
                except BlockingIOError:
                    await asyncio.sleep(0.005)
                else:
                    break
        for fd in fds:
            os.close(fd)
        if not data:
            raise EOFError
        return Report.read(data, ())

    async def ask(self, kind: int, *arguments: int, fds: Sequence[int] = ()) -> Report:
        self.say(order(kind, 7, *arguments), fds)
        return await self.hear()

    async def is_dropped(self) -> None:
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                await self.hear()

    def close(self) -> None:
        self._control.close()


@pytest.fixture
async def holder(sandbox: Sandbox) -> BubblewrapSandbox:
    assert isinstance(sandbox, BubblewrapSandbox)
    return sandbox


@pytest.fixture
async def guest(holder: BubblewrapSandbox) -> AsyncIterator[Guest]:
    made = await Guest.admitted(holder)
    yield made
    made.close()


@pytest.mark.parametrize("kind", [PAUSE, RESUME, NETWORK, HOLD, RELEASE, ADMIT])
async def test_orders_that_concern_everybody_are_refused_to_a_guest(
    kind: int, holder: BubblewrapSandbox, guest: Guest
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        fds = [theirs.fileno()] if kind == ADMIT else []
        by_holder = await holder._agent.ask(kind, fds=fds)
        assert by_holder.without_fd().kind == DONE
        await holder._agent.ask(RESUME)
        await holder._agent.ask(RELEASE)
        by_guest = await guest.ask(kind, fds=fds)
    assert (by_guest.kind, by_guest.a) == (REFUSED, errno.EPERM)
    assert (await holder.run(["/bin/true"], timeout_s=DEADLINE_S)).ok


@pytest.mark.parametrize("kind", [0, JOIN, LAUNCH, OPEN, 99, 2**32 - 1])
async def test_an_order_that_means_nothing_here_ends_no_sandbox(
    kind: int, holder: BubblewrapSandbox, guest: Guest
) -> None:
    assert (await guest.ask(kind)).kind == REFUSED
    assert (await holder.run(["/bin/true"])).ok
    holder._agent._control.send(order(kind))  # the control: it ends a sandbox whose holder gives it
    await asyncio.wait_for(holder.gone(), DEADLINE_S)


async def test_a_guest_signals_nothing_that_is_not_its_own(holder: BubblewrapSandbox, guest: Guest) -> None:
    victim = await holder.start(["/bin/sleep", "60"])
    for pid in (-1, victim.pid, -victim.pid, 1, 0):
        guest.say(order(SIGNAL, 0, signal.SIGKILL, 0, pid))
        answer = await guest.hear()
        assert (answer.kind, answer.a) == (REFUSED, errno.EPERM)
    number = int(victim.id.removeprefix("p"))
    for name in range(1, number + 5):  # numbers of the holder's orders, and the one by which it knows this guest
        guest.say(order(SIGNAL, name, signal.SIGKILL, 0, 4, 1))
    assert (await guest.ask(BEGIN)).kind == DONE
    assert (await holder.run(["/bin/kill", "-0", str(victim.pid)])).ok
    await holder._agent.signal_inside(-1, signal.SIGKILL)
    assert (await victim.wait()).signal == signal.SIGKILL
    victim.release()


@pytest.mark.parametrize(
    "garbage", [b"x", order(BEGIN)[:-1], order(BEGIN) + b"\0", b"\xff" * 60_000], ids=["byte", "short", "long", "60 kB"]
)
async def test_what_is_no_order_ends_the_guest_and_nobody_else(
    garbage: bytes, holder: BubblewrapSandbox, guest: Guest
) -> None:
    guest.say(garbage)
    await guest.is_dropped()
    await asyncio.wait_for(holder.alone(), DEADLINE_S)
    assert (await holder.run(["/bin/true"])).ok
    holder._agent._control.send(garbage)
    await asyncio.wait_for(holder.gone(), DEADLINE_S)


async def _stuff(holder: BubblewrapSandbox) -> Guest:
    """Ask and ask, and read no answer, until no more can be asked."""
    guest = await Guest.admitted(holder)
    full = 0
    with contextlib.suppress(ConnectionError):
        while full < 50:
            try:
                guest.say(order(CONNECT, 7, 1))
                full = 0
            except BlockingIOError:
                full += 1
                await asyncio.sleep(0.01)
    return guest


async def test_a_guest_that_does_not_read_holds_nobody_up(holder: BubblewrapSandbox) -> None:
    async with PATIENT.sandbox() as patient:
        stuffed = await _stuff(patient)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(patient.run(["/bin/true"]), 1)
        stuffed.close()
    stuffed = await _stuff(holder)
    assert (await holder.run(["/bin/true"], timeout_s=DEADLINE_S)).ok
    await asyncio.wait_for(holder.alone(), DEADLINE_S)
    stuffed.close()


async def _spawned(guest: Guest, *, sealed: bool) -> Report:
    null, memory = os.open("/dev/null", os.O_RDWR), os.memfd_create("order", os.MFD_ALLOW_SEALING)
    try:
        os.write(memory, Spawn(argv=["/bin/true"], env={}, cwd="/").payload())
        if sealed:
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        return await guest.ask(SPAWN, fds=[memory, null, null, null])
    finally:
        os.close(memory)
        os.close(null)


async def test_a_guest_cannot_change_a_command_while_the_agent_reads_it(
    holder: BubblewrapSandbox, guest: Guest
) -> None:
    """Cut short at that moment, it would be the agent that dies of it."""
    async with TRUSTING.sandbox() as trusting:
        other = await Guest.admitted(trusting)
        assert (await _spawned(other, sealed=False)).kind == STARTED
        other.close()
    assert (await _spawned(guest, sealed=False)).kind == REFUSED
    assert (await _spawned(guest, sealed=True)).kind == STARTED


async def _opened_by_agent(sandbox: BubblewrapSandbox) -> int:
    """Flood an agent with descriptors, and return how many more it has open afterwards."""
    outer = sandbox.launcher.pid
    (agent,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    guest = await Guest.admitted(sandbox)

    def opened() -> int:
        return sum(1 for _ in Path(f"/proc/{agent}/fd").iterdir())

    before = opened()
    with open("/dev/null") as file:
        for kind in (PAUSE, BEGIN, SPAWN, CONNECT, 99):
            for _ in range(4):
                await guest.ask(kind, fds=[file.fileno()] * 30)
    more = opened() - before
    guest.close()
    return more


@pytest.mark.skipif(not IS_ROOT, reason="only root sees what an agent has open")
async def test_descriptors_that_a_guest_sends_along_are_not_kept(holder: BubblewrapSandbox) -> None:
    async with HOARDING.sandbox() as hoarding:
        assert await _opened_by_agent(hoarding) > 500
    assert await _opened_by_agent(holder) == 0


async def test_what_is_no_socket_of_records_admits_nobody(holder: BubblewrapSandbox) -> None:
    stream, end = socket.socketpair()
    with stream, end, open("/dev/null") as file, socket.socket() as other:
        for fds in ([], [file.fileno()], [stream.fileno()], [other.fileno()]):
            report = await holder._agent.ask(ADMIT, fds=fds)
            assert (report.kind, report.a) == (REFUSED, errno.EINVAL)
    good = await Guest.admitted(holder)
    assert await soon(lambda: holder.guests == 1)
    good.close()
