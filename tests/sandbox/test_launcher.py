"""Starting a sandbox's processes, failing to, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from skep.errors import SandboxUnusable
from skep.sandbox import launcher
from skep.sandbox.binary import Bwrap
from skep.sandbox.bubblewrap import BubblewrapSandbox, draw_plan
from skep.sandbox.launcher import Launcher, Plan, Spare, spare
from skep.sandbox.recipe import Recipe


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _held() -> tuple[set[str], set[str]]:
    """Say what this process has: launchers, and children. Records alone would show other processes' too."""
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return set(launcher._held), {pid for pids in children for pid in pids}


def test_a_plan_numbers_descriptors_as_the_launcher_will_see_them() -> None:
    plan = Plan(Bwrap.find())
    first, second = plan.memory(b"one"), plan.memory(b"two")
    numbers = [plan.number(fd) for fd in (first, second, first)]
    assert numbers == [6, 7, 6]
    plan.add("--file", "6", "/a b\nc")
    sealed = plan.seal()
    assert os.pread(sealed[1], 100, 0) == b"--file\x006\x00/a b\nc\x00"
    plan.close()


def test_a_plan_closes_all_it_opened() -> None:
    before = _descriptors()
    plan = draw_plan(Recipe())
    plan.seal()
    assert _descriptors() > before
    plan.close()
    assert _descriptors() == before
    assert plan.throwaway is not None
    os.rmdir(plan.throwaway[0])  # noqa: PTH106 - the plan speaks of it as text


def test_a_launcher_that_is_ended_leaves_nothing() -> None:
    before = _descriptors()
    started = Launcher.start()
    record, folders = started.record.path, [folder for folder, _ in started.group.folders.values()]
    assert _alive(started.pid)
    assert record.exists()
    assert all(Path(folder).is_dir() for folder in folders)
    started.end_now()
    assert not _alive(started.pid)
    assert not record.exists()
    assert not any(Path(folder).exists() for folder in folders)
    assert _descriptors() == before


def test_a_launcher_that_died_or_is_halted_can_be_ended() -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        started = Launcher.start()
        os.kill(started.pid, number)
        started.end_now()
        assert not _alive(started.pid)
        assert not started.record.path.exists()


def test_a_spare_is_made_in_the_background_taken_once_and_dropped() -> None:
    kept = Spare()
    kept.refill()
    kept.refill()
    deadline = time.monotonic() + 10
    while kept._launcher is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid = kept._launcher.pid
    first = kept.take()
    assert first.pid == pid
    other = kept.take()
    assert other.pid != pid
    for taken in (first, other):
        taken.end_now()
    kept.refill()
    kept.drop()
    kept.drop()
    assert kept._launcher is None


async def test_a_spare_that_died_meanwhile_is_not_used() -> None:
    spare().drop()
    spare().refill()
    thread = spare()._thread
    assert thread is not None
    thread.join()
    kept = spare()._launcher
    assert kept is not None
    os.kill(kept.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while not kept.died():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    async with await BubblewrapSandbox.start_from(Recipe(), spares=False) as sandbox:
        assert (await sandbox.run("echo fine")).ok


async def _refused(plan: Plan) -> SandboxUnusable:
    # The process's spare is ended first, so that what is counted afterwards is this sandbox's alone.
    spare().drop()
    held, descriptors = _held(), _descriptors()
    with pytest.raises(SandboxUnusable) as refused:
        await BubblewrapSandbox.start_from(Recipe(), plan=plan, spares=False)
    assert _held() == held
    assert _descriptors() <= descriptors
    assert plan.throwaway is not None
    assert not Path(plan.throwaway[0]).exists()
    return refused.value


async def test_what_bwrap_complains_of_is_passed_on() -> None:
    plan = draw_plan(Recipe())
    plan.add("--no-such-option")
    assert "--no-such-option" in (await _refused(plan)).message


async def test_without_a_system_call_filter_there_is_no_sandbox() -> None:
    refused = await _refused(draw_plan(Recipe(), filter_program=b""))
    assert "without a system call filter" in refused.message


@pytest.mark.parametrize(
    "program", [b"\0" * 8, b"x" * 80, b"\x06\0\0\0\0\0\xff\x7f" * 5000], ids=["nop", "junk", "long"]
)
async def test_a_filter_that_the_kernel_refuses_means_no_sandbox(program: bytes) -> None:
    assert (await _refused(draw_plan(Recipe(), filter_program=program))).hint


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    spare().drop()
    async with await BubblewrapSandbox.start_from(Recipe(), spares=False):
        pass  # warms up what is loaded once
    held, descriptors = _held(), _descriptors()
    for steps in range(8):
        starting = asyncio.ensure_future(BubblewrapSandbox.start_from(Recipe(), spares=False))
        for _ in range(steps):
            await asyncio.sleep(0.001)
        starting.cancel()
        try:
            sandbox = await starting
        except asyncio.CancelledError:
            continue
        await sandbox.stop()
    assert _held() == held
    assert _descriptors() <= descriptors
