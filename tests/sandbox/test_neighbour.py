"""What a holder and its guests can do beside each other in a sandbox over a byte stream."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
from tests.sandbox.machines import start_on_machine

from skep.errors import Conflict, InvalidRequest, NotFound, SandboxLost
from skep.sandbox.interpreter import Interpreter
from skep.sandbox.neighbour import NeighbourSandbox, visit
from skep.sandbox.stream import StreamSandbox
from skep.testing.promise import eventually, running


@pytest.fixture
async def holder() -> AsyncIterator[StreamSandbox]:
    async with await start_on_machine() as sandbox:
        yield sandbox


@pytest.fixture
async def guest(holder: StreamSandbox) -> AsyncIterator[NeighbourSandbox]:
    async with await joined(holder) as sandbox:
        yield sandbox


async def joined(holder: StreamSandbox) -> NeighbourSandbox:
    found = await visit(await holder.admit(), holder.introduction())
    assert isinstance(found, NeighbourSandbox)
    return found


async def test_guest_and_holder_share_files_processes_and_ports(holder: StreamSandbox, guest: NeighbourSandbox) -> None:
    await guest.run("echo 1 > file; echo 2 > /tmp/file; sleep 1000 & echo $! > pid")
    assert await holder.files.read("file") == b"1\n"
    assert (await holder.run("cat /tmp/file")).stdout == b"2\n"
    assert await running(holder, int(await holder.files.read("pid")))
    await holder.files.write("file", b"3" * 3_000_000)  # more than may be under way at once
    assert await guest.files.read("file") == b"3" * 3_000_000
    assert (await guest.run("wc -c", input=b"x" * 3_000_000)).text.strip() == "3000000"
    with pytest.raises(NotFound):
        await guest.connect(9)


async def test_each_hears_of_its_own_commands_though_they_count_alike(
    holder: StreamSandbox, guest: NeighbourSandbox
) -> None:
    both = (("holder", holder), ("guest", guest))
    rounds = [sandbox.run(f"echo {name}-{number}; exit {number}") for number in range(10) for name, sandbox in both]
    told = [(result.text.strip(), result.exit_code) for result in await asyncio.gather(*rounds)]
    assert told == [(f"{name}-{number}", number) for number in range(10) for name, _ in both]


async def test_leaving_ends_what_was_started_there_and_nothing_else(
    holder: StreamSandbox, guest: NeighbourSandbox
) -> None:
    stays = await holder.start("sleep 1000")
    left = int((await guest.run("sleep 1000 > /dev/null 2>&1 & echo $!")).text)
    goes = await guest.start("trap '' TERM HUP; sleep 1000")
    assert (holder.guests, await holder.occupied()) == (1, True)
    await guest.stop()
    with pytest.raises(SandboxLost):
        await goes.wait()
    await asyncio.wait_for(holder.alone(), 30)

    async def gone() -> bool:
        return not await running(holder, goes.pid)

    await eventually(gone)
    assert await running(holder, stays.pid)
    assert await running(holder, left)
    await stays.kill()
    assert (await stays.wait()).signal == signal.SIGKILL


async def test_a_guest_keeps_variables_of_its_own_and_loses_them_with_the_holder(
    holder: StreamSandbox, guest: NeighbourSandbox
) -> None:
    async with Interpreter(guest) as interpreter:
        context = interpreter.context()
        await context.run("x = 6")
        assert (await context.run("print(x * 7)")).stdout == "42\n"
        await holder.stop()
        with pytest.raises(SandboxLost):
            await guest.run("true")


async def test_what_concerns_everybody_inside_is_the_holders(holder: StreamSandbox, guest: NeighbourSandbox) -> None:
    for act in (guest.pause(), guest.resume(), guest.kill_all(), guest.admit()):
        with pytest.raises(InvalidRequest, match="another process holds it"):
            await act
    assert (await holder.run("echo fine")).text == "fine\n"


async def test_an_introduction_that_is_not_understood_is_refused(holder: StreamSandbox) -> None:
    with pytest.raises(Conflict):
        await visit(await holder.admit(), {**holder.introduction(), "version": 9})
    await asyncio.wait_for(holder.alone(), 30)
