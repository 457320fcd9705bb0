"""What a holder and its guests can do beside each other in one sandbox."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from skep.errors import Conflict, InvalidRequest, LimitReached, NotFound, SandboxLost, WorkspaceBusy
from skep.sandbox.agent import BEGIN, HOLD, REFUSED, RELEASE, Agent
from skep.sandbox.bubblewrap import BubblewrapSandbox
from skep.sandbox.egress.network import Network
from skep.sandbox.egress.policy import Policy
from skep.sandbox.interpreter import Interpreter
from skep.sandbox.joining import JoinedSandbox, join
from skep.sandbox.layering import layering
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Process, Sandbox
from skep.sandbox.stack import Stack
from skep.testing.promise import eventually, running


@pytest.fixture
async def holder() -> AsyncIterator[BubblewrapSandbox]:
    async with Sandbox.create() as sandbox:
        assert isinstance(sandbox, BubblewrapSandbox)
        yield sandbox


@pytest.fixture
async def guest(holder: BubblewrapSandbox) -> AsyncIterator[JoinedSandbox]:
    async with await joined(holder) as sandbox:
        yield sandbox


async def joined(holder: Sandbox) -> JoinedSandbox:
    return await join(await holder.admit(), holder.introduction())


async def ended(process: Process) -> int | None:
    try:
        return (await asyncio.wait_for(process.wait(), 5)).signal
    finally:
        process.release()


async def test_guest_and_holder_share_files_and_processes(holder: BubblewrapSandbox, guest: JoinedSandbox) -> None:
    await guest.run("echo 1 > file; echo 2 > /tmp/file; sleep 1000 & echo $! > pid")
    assert await holder.files.read("file") == b"1\n"
    assert (await holder.run("cat /tmp/file")).stdout == b"2\n"
    assert await running(holder, int(await holder.files.read("pid")))
    await holder.files.write("file", b"3")
    assert await guest.files.read("file") == b"3"
    assert guest.id == holder.id


async def test_each_hears_of_its_own_commands_though_they_count_alike(
    holder: BubblewrapSandbox, guest: JoinedSandbox
) -> None:
    async with await joined(holder) as third:
        rounds = [
            sandbox.run(f"echo {name}-{number}; exit {number}")
            for number in range(20)
            for name, sandbox in (("holder", holder), ("guest", guest), ("third", third))
        ]
        results = await asyncio.gather(*rounds)
    told = [(result.text.strip(), result.exit_code) for result in results]
    assert told == [(f"{name}-{number}", number) for number in range(20) for name in ("holder", "guest", "third")]


async def test_a_signal_reaches_only_the_senders_command_of_that_number(
    holder: BubblewrapSandbox, guest: JoinedSandbox
) -> None:
    theirs = {process.id: process for process in [await holder.start("sleep 1000") for _ in range(4)]}
    mine = next(process for process in [await guest.start("sleep 1000") for _ in range(4)] if process.id in theirs)
    await mine.signal(signal.SIGUSR1)
    assert await ended(mine) == signal.SIGUSR1
    await theirs[mine.id].signal(signal.SIGUSR2)
    assert await ended(theirs[mine.id]) == signal.SIGUSR2


async def test_leaving_ends_what_was_started_there_and_nothing_else(
    holder: BubblewrapSandbox, guest: JoinedSandbox
) -> None:
    other = await joined(holder)
    stays = [await holder.start("sleep 1000"), await other.start("sleep 1000")]
    goes = await guest.start("trap '' TERM HUP; sleep 1000 & sleep 1000; wait")
    await eventually(lambda: _has(group_of(holder, goes.pid), 3))
    await guest.stop()
    with pytest.raises(SandboxLost):
        await goes.wait()

    async def gone() -> bool:
        return not await running(holder, goes.pid)

    await eventually(gone)
    assert await group_of(holder, goes.pid) == 0
    for process in stays:
        assert await running(holder, process.pid)
        await process.kill()
        assert await ended(process) == signal.SIGKILL
    await other.stop()


async def group_of(sandbox: Sandbox, pid: int) -> int:
    """Count the processes inside that are in a group."""
    found = await sandbox.run("cat /proc/[0-9]*/stat 2>/dev/null")
    return sum(line.rpartition(")")[2].split()[2] == str(pid) for line in found.text.splitlines())


async def _has(count: Awaitable[int], expected: int) -> bool:
    return await count == expected


async def test_what_has_left_its_group_stays_with_the_sandbox(holder: BubblewrapSandbox, guest: JoinedSandbox) -> None:
    await guest.run("setsid sleep 1000 & echo $! > pid")
    pid = int(await holder.files.read("pid"))
    job = await guest.background("setsid -f sleep 1000; echo up; sleep 1000")
    await eventually(lambda: _logged(job.log, b"up"))
    await asyncio.wait_for(guest.stop(), 5)
    assert [chunk async for chunk in job.attach()] == [b"up\n"]
    await eventually(lambda: _alone(holder))
    assert await running(holder, pid)


async def _logged(log: object, mark: bytes) -> bool:
    return mark in log.read(0).data  # type: ignore[attr-defined]


async def _alone(holder: Sandbox) -> bool:
    return holder.guests == 0


async def test_the_holders_end_is_the_end_of_its_guests(holder: BubblewrapSandbox, guest: JoinedSandbox) -> None:
    waiting = asyncio.ensure_future(guest.run("sleep 1000"))
    await guest.run("true")
    await holder.stop()
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(waiting, 2)
    await asyncio.wait_for(guest.gone(), 2)


async def test_what_concerns_everybody_is_refused_to_a_guest(holder: BubblewrapSandbox, guest: JoinedSandbox) -> None:
    process = await holder.start("sleep 1000")
    for act in (
        guest.pause, guest.resume, guest.kill_all, guest.admit,
        lambda: guest.set_policy(Policy()), lambda: guest.restack(Stack("/upper", "/work")),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match="another process holds it") as refused:
            await act()
        assert refused.value.hint is not None
    assert await running(holder, process.pid)
    process.release()


async def test_the_holder_knows_how_many_there_are_and_when_they_have_gone(holder: BubblewrapSandbox) -> None:
    await asyncio.wait_for(holder.alone(), 5)
    guests = [await joined(holder) for _ in range(3)]
    assert holder.guests == 3
    for left, guest in enumerate(guests, 1):
        waiting = asyncio.ensure_future(holder.alone())
        await guest.run("true")
        assert not waiting.done()
        await guest.stop()
        await eventually(lambda left=left: _counts(holder, 3 - left))  # type: ignore[misc]
        if left < 3:
            waiting.cancel()
    await asyncio.wait_for(waiting, 5)


async def _counts(holder: Sandbox, guests: int) -> bool:
    return holder.guests == guests


async def test_there_is_room_for_64_guests_and_one_more_is_refused(holder: BubblewrapSandbox) -> None:
    guests = [await joined(holder) for _ in range(64)]
    with pytest.raises(LimitReached):
        await holder.admit()
    assert holder.guests == 64
    await guests[20].stop()
    await eventually(lambda: _counts(holder, 63))
    guests[20] = await joined(holder)
    outputs = await asyncio.gather(*(guest.run(f"echo {number}") for number, guest in enumerate(guests)))
    assert [output.text for output in outputs] == [f"{number}\n" for number in range(64)]
    for guest in guests:
        await guest.stop()
    await asyncio.wait_for(holder.alone(), 5)


async def test_a_connection_that_nobody_takes_up_is_forgotten(holder: BubblewrapSandbox) -> None:
    (await holder.admit()).close()
    await asyncio.wait_for(holder.alone(), 5)
    assert (await holder.run("echo fine")).ok


async def test_an_introduction_of_another_version_is_refused_with_a_way_out(holder: BubblewrapSandbox) -> None:
    wrongs: tuple[dict[str, object], ...] = ({"version": 2}, {"limits": None}, {"group": {}})
    for wrong in wrongs:
        with pytest.raises(Conflict) as refused:
            await join(await holder.admit(), {**holder.introduction(), **wrong})
        assert "end that process" in (refused.value.hint or "")
    await asyncio.wait_for(holder.alone(), 5)


async def test_a_guest_can_connect_expose_and_interpret(guest: JoinedSandbox) -> None:
    with pytest.raises(NotFound):
        await guest.connect(8000)
    server = await guest.background("python3 -m http.server 8000 --bind 127.0.0.1")
    await eventually(lambda: _listens(guest))
    async with await guest.expose(8000) as exposure:
        assert exposure.token
    await server.kill()
    async with Interpreter(guest) as interpreter:
        await interpreter.run("a = 20")
        cell = await interpreter.run("print(a + 1)")
    assert "21" in str(cell)


async def _listens(guest: Sandbox) -> bool:
    try:
        (await guest.connect(8000)).close()
    except NotFound:
        return False
    return True


async def test_a_guest_uses_the_holders_network(guest: JoinedSandbox) -> None:
    async with Sandbox.create(network=Network(Policy())) as holder, await joined(holder) as other:
        mine, theirs = [(await sandbox.run("env | sort | grep -v ^_=")).text for sandbox in (other, holder)]
        assert mine == theirs
        assert "SSL_CERT_FILE" in mine
        assert "SSL_CERT_FILE" not in (await guest.run("env")).text


async def test_a_limit_that_the_kernel_holds_is_named_to_a_guest() -> None:
    limits = Limits(memory_bytes=64 << 20, processes=40)
    async with Sandbox.create(limits=limits) as holder, await joined(holder) as guest:
        if guest.limited_by == "none":
            pytest.skip("nothing but the holder counts what was ended for memory here")
        greedy = await guest.run(["python3", "-c", "b = bytearray(200 << 20); print(len(b))"])
        assert (greedy.ok, greedy.limit) == (False, "memory")
        crowd = await guest.run("for i in $(seq 60); do sleep 5 & done; wait")
        assert crowd.limit == "processes"
        assert (await guest.run("true")).limit is None


async def test_disk_is_watched_while_only_a_guest_is_at_work_and_named_to_it() -> None:
    async with Sandbox.create(limits=Limits(disk_bytes=32 << 20)) as holder, await joined(holder) as guest:
        filling = "i=0; while :; do i=$((i+1)); head -c 4000000 /dev/zero > file$i || exit 7; done"
        ended = await guest.run(filling, timeout_s=60)
        assert (ended.exit.signal, ended.limit) == (signal.SIGKILL, "disk")
        assert (await guest.run("rm file*")).ok


async def _hold(holder: BubblewrapSandbox) -> bool:
    return (await holder._agent.ask(HOLD)).kind != REFUSED


async def test_a_held_sandbox_makes_guests_wait(holder: BubblewrapSandbox, guest: JoinedSandbox) -> None:
    assert await _hold(holder)
    acts = [asyncio.ensure_future(act) for act in (guest.run("echo on"), guest.files.write("file", b"1"))]
    for _ in range(20):
        await holder._agent.ask(HOLD)
    assert not any(act.done() for act in acts)
    await holder._agent.ask(RELEASE)
    for act in acts:
        await asyncio.wait_for(act, 5)
    assert await holder.files.read("file") == b"1"


async def test_a_sandbox_is_held_only_if_nothing_at_all_is_in_it(
    holder: BubblewrapSandbox, guest: JoinedSandbox
) -> None:
    for sandbox in (holder, guest):
        process = await sandbox.start("sleep 1000")
        assert not await _hold(holder)
        await process.kill()
        await ended(process)
        assert await _hold(holder)
        await holder._agent.ask(RELEASE)
    await guest.run("setsid -f sleep 1000")
    assert not await _hold(holder)


async def test_a_zombie_is_something_too(holder: BubblewrapSandbox, guest: JoinedSandbox) -> None:
    """Its parent lives and could start more, whatever else is to be seen."""
    process = await guest.start(
        ["python3", "-c", "import os, time; os.fork() or os._exit(0); print(1, flush=True); time.sleep(1000)"]
    )
    assert await process.stdout.read() == b"1\n"
    assert not await _hold(holder)
    await process.kill()
    await ended(process)


async def test_files_are_not_held_amid_a_guests_work_on_them(holder: BubblewrapSandbox, guest: JoinedSandbox) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"1"
        begun.set()
        await go_on.wait()
        yield b"2"

    writing = asyncio.ensure_future(guest.files.write("file", pieces()))
    await begun.wait()
    assert not await _hold(holder)
    go_on.set()
    await writing
    assert await _hold(holder)
    await holder._agent.ask(RELEASE)
    assert await holder.files.read("file") == b"12"


async def test_work_on_files_that_is_cancelled_at_any_moment_holds_nothing_up(
    holder: BubblewrapSandbox, guest: JoinedSandbox
) -> None:
    for turns in range(30):
        acts = [asyncio.ensure_future(act) for act in (guest.files.write("file", b"1"), guest.files.list())]
        for _ in range(turns):
            await asyncio.sleep(0)
        for act in acts:
            act.cancel()
        await asyncio.gather(*acts, return_exceptions=True)
    await eventually(lambda: _hold(holder))
    await holder._agent.ask(RELEASE)


async def test_a_guest_that_goes_amid_its_work_holds_nothing_up(holder: BubblewrapSandbox) -> None:
    agent = Agent(await holder.admit())
    os.close(await agent.ready())
    await agent.ask(BEGIN)
    assert not await _hold(holder)
    agent.close()
    await asyncio.wait_for(holder.alone(), 5)
    assert await _hold(holder)


def _stack(folder: Path, name: str, layers: tuple[str, ...]) -> Stack:
    for part in ("tree", "work"):
        (folder / name / part).mkdir(parents=True)
    return Stack(str(folder / name / "tree"), str(folder / name / "work"), layers)


@pytest.fixture
def stack(tmp_path: Path) -> Callable[..., Stack]:
    if layering() == "none":
        pytest.skip("this kernel mounts no overlay for an ordinary user")
    (tmp_path / "layer").mkdir()
    layer = str(tmp_path / "layer")
    return lambda name, *above: _stack(tmp_path, name, (*above, layer))


async def test_a_guest_goes_on_in_a_workspace_that_was_swapped(stack: Callable[..., Stack]) -> None:
    first = stack("first")
    async with Sandbox.create(stack=first) as holder, await joined(holder) as guest:
        await guest.files.write("kept", b"1")
        process = await guest.start("sleep 1000")
        second = stack("second", first.upper)
        owner = Path(first.upper).stat()
        os.chown(second.upper, owner.st_uid, owner.st_gid)
        with pytest.raises(WorkspaceBusy):
            await holder.restack(second)
        await process.kill()
        await ended(process)
        await holder.restack(second)
        with pytest.raises(NotFound):
            await guest.files.read("missing")
        assert await guest.files.read("kept") == b"1"
        await guest.files.write("new", b"2")
        assert (await guest.run("cat kept new")).stdout == b"12"
        assert Path(second.upper, "new").read_bytes() == b"2"
        assert not Path(first.upper, "new").exists()


async def test_a_forked_child_does_not_keep_a_guests_commands_alive(
    holder: BubblewrapSandbox, guest: JoinedSandbox
) -> None:
    process = await guest.start("sleep 1000")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until its parent lets it go
        os._exit(0)
    try:
        await guest.stop()
        await asyncio.wait_for(holder.alone(), 30)

        async def ended() -> bool:
            return not await running(holder, process.pid)

        await eventually(ended)
    finally:
        process.release()
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
