"""A guest that is killed with -9 at any moment leaves nothing behind, in the holder or in the sandbox."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.crashes.joiner import MOMENTS

from skep.errors import SandboxLost
from skep.sandbox.joining import JoinedSandbox, join
from skep.testing.promise import eventually
from skep.workspace.door import call

HOLDER = Path(__file__).parent.parent / "sandbox" / "holder.py"
JOINER = Path(__file__).with_name("joiner.py")


@dataclass(frozen=True, slots=True)
class Place:
    """A holder in a process of its own, and a guest here that keeps its sandbox going."""

    folder: Path
    process: subprocess.Popen[bytes]
    sandbox: JoinedSandbox

    async def descriptors(self) -> int:
        return int((await call(self.folder, {"act": "count"})).body["fds"])

    async def guests(self) -> int:
        return int((await call(self.folder, {"act": "guests", "id": self.sandbox.id})).body["guests"])


@contextmanager
def started(*command: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of the programs here until it says that it is ready, and kill it at the end."""
    with subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    with started(HOLDER, tmp_path) as process:
        answer = await call(tmp_path, {"act": "make", "limits": None})
        async with await join(socket.socket(fileno=answer.fds[0]), answer.body) as sandbox:
            yield Place(tmp_path, process, sandbox)


async def kill_one(place: Place, moment: str, after_s: float = 0.0) -> int:
    """Kill a guest at a moment; return the number it had."""

    def blocking() -> int:
        with started(JOINER, place.folder, place.sandbox.id, moment) as guest:
            if after_s:
                with pytest.raises(subprocess.TimeoutExpired):
                    guest.wait(after_s)
        return guest.pid

    return await asyncio.to_thread(blocking)


async def runs(place: Place, pid: int) -> bool:
    """Say whether something runs inside that a guest has started."""
    found = await place.sandbox.run(f"grep -lz '^1000[.]{pid}$' /proc/[0-9]*/cmdline")
    return bool(found.stdout)


async def nothing_is_left(place: Place, pid: int, before: int) -> None:
    async def as_before() -> bool:
        return (await place.guests(), await place.descriptors()) == (1, before)

    async def ended() -> bool:
        return not await runs(place, pid)

    await eventually(as_before)
    await eventually(ended)
    assert (await place.sandbox.run("echo fine")).stdout == b"fine\n"


@pytest.mark.parametrize("moments", [MOMENTS[:4], MOMENTS[4:]], ids=["at the door", "inside"])
async def test_a_guest_killed_at_any_moment_leaves_nothing_behind(place: Place, moments: tuple[str, ...]) -> None:
    await kill_one(place, "running")  # what is opened once for all
    await eventually(lambda: _is(place, 1))
    before = await place.descriptors()
    for moment in moments:
        await nothing_is_left(place, await kill_one(place, moment), before)


async def _is(place: Place, guests: int) -> bool:
    return await place.guests() == guests


@pytest.mark.parametrize("moment", ["coming and going", "spawning"])
async def test_a_guest_killed_amid_its_doings_leaves_nothing_behind(place: Place, moment: str) -> None:
    chance = random.Random(5)
    await kill_one(place, "running")
    await eventually(lambda: _is(place, 1))
    before = await place.descriptors()
    for _ in range(5):
        pid = await kill_one(place, moment, after_s=chance.uniform(0.001, 0.1))
        await nothing_is_left(place, pid, before)


@pytest.mark.parametrize("moment", ["running", "deaf", "terminal"])
async def test_while_a_guest_lives_its_commands_run(place: Place, moment: str) -> None:
    """Without this, the others would find nothing left for want of anything."""
    with started(JOINER, place.folder, place.sandbox.id, moment) as guest:
        await eventually(lambda: runs(place, guest.pid))
        assert await place.guests() == 2


async def test_commands_of_other_guests_go_on(place: Place) -> None:
    process = await place.sandbox.start("sleep 1000")
    await kill_one(place, "deaf")
    await eventually(lambda: _is(place, 1))
    assert (await place.sandbox.run(["kill", "-0", str(process.pid)])).ok
    await process.kill()
    assert (await process.wait()).signal == 9
    process.release()


async def test_a_holder_that_is_killed_takes_its_guests_commands_along(place: Place) -> None:
    waiting = asyncio.ensure_future(place.sandbox.run("sleep 1000"))
    await place.sandbox.run("true")
    place.process.kill()
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(waiting, 2)
