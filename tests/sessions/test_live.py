"""A computer of this process knows whether somebody works in it, and takes no more work once it is put away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.sessions.conftest import Clock

from skep.errors import SandboxLost
from skep.sandbox.sandbox import Sandbox
from skep.sessions.live import Live
from skep.sessions.session import Session


@dataclass(slots=True)
class Held:
    """A folder in this process's hands."""

    folder: Path
    running: Sandbox | None = None

    async def sandbox(self) -> Sandbox:
        if self.running is None or not await self.running.alive():
            self.running = await Sandbox.create(self.folder)
        return self.running

    async def stop(self) -> None:
        if self.running is not None:
            await self.running.stop()

    async def leave(self) -> None:
        await self.stop()


@pytest.fixture
async def live(tmp_path: Path, clock: Clock) -> AsyncIterator[Live]:
    held = Held(tmp_path / "workspace")
    session = Session("id", "bees", "hv-1", "cli:x", "active", clock(), clock(), clock())
    live = Live(session, await held.sandbox(), held, AsyncExitStack(), clock)
    yield live
    await live.end()


async def test_a_computer_in_which_nothing_happens_is_not_busy(live: Live, clock: Clock) -> None:
    began = clock()
    clock.pass_(hours=1)
    assert not await live.busy()
    assert live.used_at == began


async def test_a_call_is_use_until_it_ends(live: Live, clock: Clock) -> None:
    with live.used():
        clock.pass_(hours=1)
        assert await live.busy()
        clock.pass_(hours=1)
    assert live.used_at == clock()
    assert not await live.busy()


async def test_a_process_is_use_until_it_ends(live: Live, clock: Clock) -> None:
    process = await live.sandbox.start("sleep 600")
    clock.pass_(hours=1)
    assert await live.busy() and live.used_at == clock()
    await process.kill()
    await process.wait()
    process.release()
    async with asyncio.timeout(30):
        while await live.busy():
            await asyncio.sleep(0.02)


async def test_a_computer_that_is_put_away_takes_no_more_work(live: Live) -> None:
    assert await live.retire()
    with pytest.raises(SandboxLost, match="put away"), live.used():
        raise AssertionError("it let somebody in")


async def test_a_computer_at_work_is_not_put_away(live: Live) -> None:
    with live.used():
        assert not await live.retire()
    with live.used() as sandbox:
        assert (await sandbox.run("true")).ok


async def test_work_that_comes_while_a_computer_is_looked_at_is_not_cut_off(live: Live) -> None:
    retiring = asyncio.create_task(live.retire())
    await asyncio.sleep(0)  # it is looking for processes now
    with live.used() as sandbox:
        ran = await sandbox.run("echo done")
    assert not await retiring
    assert ran.text == "done\n"


def first_process(folder: Path) -> int:
    """Return the number that the host has for the first process of the sandbox over a folder."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):  # it has just ended, or is another user's
                inside = next(line for line in (process / "status").read_text().splitlines() if "NSpid" in line)
                if inside.split()[-1] == "1" and f"{folder} " in (process / "mountinfo").read_text():
                    return int(process.name)
    raise AssertionError(f"there is no sandbox over {folder}")


async def test_a_computer_that_hangs_is_not_taken_for_a_healthy_one_and_is_restarted(
    live: Live, tmp_path: Path
) -> None:
    assert await live.answers()
    os.kill(first_process(tmp_path / "workspace"), signal.SIGSTOP)
    assert not await live.answers()
    await live.restart()
    assert await live.answers()


async def test_a_sandbox_that_has_died_is_noticed_at_once(live: Live) -> None:
    assert await live.healthy()
    await live.sandbox.stop()
    assert not await live.healthy()


async def test_a_restart_keeps_the_files_and_none_of_the_rooms(live: Live) -> None:
    live.shells["main"] = await live.sandbox.shell()
    await live.sandbox.run("echo kept >note")
    assert (await live.interpreter.run("x = 1")).outcome == "ok"
    await live.restart()
    assert live.shells == {} and live.interpreter.contexts() == []
    assert (await live.sandbox.run("cat note")).text == "kept\n"


async def test_contexts_are_ended_when_nobody_has_used_them_for_a_quarter_of_an_hour(live: Live, clock: Clock) -> None:
    with live.used():
        await live.interpreter.run("x = 1")
    clock.pass_(minutes=14)
    await live.tidy()
    assert len(live.interpreter.contexts()) == 1
    clock.pass_(minutes=1)
    with live.used():
        await live.tidy()  # a cell may be running
        assert len(live.interpreter.contexts()) == 1
    clock.pass_(minutes=15)
    await live.tidy()
    assert live.interpreter.contexts() == []
