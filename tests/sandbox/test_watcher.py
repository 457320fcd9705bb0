"""Limits that Skep holds by itself: the workspace's disk, and where there is no control group memory and processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from skep.sandbox import cgroups
from skep.sandbox.cgroups import Place
from skep.sandbox.launcher import spare
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox
from skep.testing.promise import eventually

MIB = 1 << 20
SMALL = Limits(disk_bytes=32 * MIB, inodes=3000, memory_bytes=128 * MIB, processes=40)


@pytest.fixture
async def sandbox(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sandbox]:
    """Give a small sandbox without control groups, as on a machine where none can be made."""
    spare().drop()
    monkeypatch.setattr(cgroups, "_found", [Place("none", {})])
    async with Sandbox.create(limits=SMALL) as made:
        yield made
    spare().drop()


async def test_a_program_that_takes_too_much_memory_is_ended_and_the_others_are_not(sandbox: Sandbox) -> None:
    job = await sandbox.background("sleep 1000")
    result = await sandbox.run("head -c 2000000000 /dev/zero | tail -c 2000000000 | wc -c; exit ${PIPESTATUS[1]}")
    assert result.limit == "memory"
    assert job.running


async def test_a_memory_limit_is_blamed_on_its_own_command_alone(sandbox: Sandbox) -> None:
    await sandbox.run("head -c 2000000000 /dev/zero | tail -c 2000000000 | wc -c; exit 0")
    assert (await sandbox.run("exit 1")).limit is None


async def test_as_many_processes_as_may_be_are_said(sandbox: Sandbox) -> None:
    result = await sandbox.run("for i in $(seq 100); do sleep 1000 & done 2>/dev/null; wait", timeout_s=2)
    assert result.limit == "processes"


async def test_files_that_fill_the_workspace_end_everything_inside_and_cleaning_up_is_possible(
    sandbox: Sandbox,
) -> None:
    result = await sandbox.run("for i in $(seq 100); do head -c 4000000 /dev/zero > f$i; done; sleep 5; exit 1")
    assert result.limit == "disk"
    assert (await sandbox.run("rm f*; sleep 0.5; echo small > ok; cat ok")).stdout == b"small\n"
    assert (await sandbox.run("head -c 4000000 /dev/zero > f; sleep 0.3")).ok


async def test_a_workspace_that_was_full_before_can_still_be_used_a_little(tmp_path: object) -> None:
    folder = os.path.join(str(tmp_path), "w")  # noqa: PTH118 - shown to the sandbox as text
    async with Sandbox.create(folder) as roomy:
        await roomy.run("head -c 60000000 /dev/zero > big")
    async with Sandbox.create(folder, limits=SMALL) as sandbox:
        assert (await sandbox.run("echo fine; sleep 0.3")).stdout == b"fine\n"
        more = "for i in $(seq 20); do head -c 4000000 /dev/zero > f$i; sleep 0.1; done; exit 1"
        assert (await sandbox.run(more)).limit == "disk"


async def test_measuring_does_not_resume_what_somebody_paused(sandbox: Sandbox) -> None:
    job = await sandbox.background("while :; do echo >> growing; done")
    await eventually(lambda: _there(sandbox))
    await sandbox.pause()
    size = (await sandbox.files.stat("growing")).size

    async def zeros() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"\0" * MIB
            await asyncio.sleep(0.02)

    # The room that this takes makes the watcher look twice.
    await sandbox.files.write("host", zeros())
    await asyncio.sleep(0.3)
    assert (await sandbox.files.stat("growing")).size == size
    await sandbox.resume()
    await job.kill()


async def test_a_watcher_ends_with_its_sandbox(sandbox: Sandbox) -> None:
    before = asyncio.all_tasks()
    await sandbox.run("true")
    watching = asyncio.all_tasks() - before
    assert watching
    await sandbox.stop()
    _, left = await asyncio.wait(watching, timeout=2)
    assert not left


async def _there(sandbox: Sandbox) -> bool:
    return any(entry.name == "growing" and entry.size for entry in await sandbox.files.list())
