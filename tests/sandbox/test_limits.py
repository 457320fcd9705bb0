"""Bombs: each is held by its sandbox's limit, said to be what it was, and felt by nobody else.

Each runs twice: held by control groups where this machine has them, and by rlimits and the watcher alone, as on a
machine that has none.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from skep.sandbox import cgroups
from skep.sandbox.cgroups import Place
from skep.sandbox.launcher import spare
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Execution, Sandbox
from skep.testing.promise import eventually

MIB = 1 << 20
#: What a neighbour may take to answer while a bomb goes off; without one it is milliseconds.
ANSWER_S = 10.0
MACHINES_PLACE = Place.find()


@pytest.fixture(autouse=True, params=["groups", "watcher"])
def held_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "groups" and MACHINES_PLACE.way == "none":
        pytest.skip("no control groups can be made here: run as root, or with a delegated group (`skep doctor`)")
    spare().drop()
    if request.param == "watcher":
        monkeypatch.setattr(cgroups, "_found", [Place("none", {})])
    yield request.param
    spare().drop()


@asynccontextmanager
async def _neighbours(limits: Limits) -> AsyncIterator[Sandbox]:
    """Give a sandbox for the bomb, while another one and the host are asked all the time whether they answer."""
    async with Sandbox.create(limits=limits) as sandbox, Sandbox.create() as neighbour:
        done = asyncio.Event()
        asking = asyncio.ensure_future(_keep_asking(neighbour, done))
        try:
            yield sandbox
        finally:
            done.set()
        assert await asking > 0


async def _keep_asking(neighbour: Sandbox, done: asyncio.Event) -> int:
    answers = 0
    while not done.is_set():
        async with asyncio.timeout(ANSWER_S):
            assert (await neighbour.run("echo $((6 * 7))")).stdout == b"42\n"
            await asyncio.to_thread(subprocess.run, ["true"], check=True)
        answers += 1
        await asyncio.sleep(0.02)
    return answers


async def _goes_on(sandbox: Sandbox) -> None:
    """Show that the sandbox of the bomb itself is usable once its processes are ended."""
    await sandbox.kill_all()
    async with asyncio.timeout(ANSWER_S):
        assert (await sandbox.run("echo on")).stdout == b"on\n"


async def _bomb(limits: Limits, command: str, *, timeout_s: float = 30) -> Execution:
    async with _neighbours(limits) as sandbox:
        result = await sandbox.run(command, timeout_s=timeout_s)
        await _goes_on(sandbox)
    return result


async def test_a_fork_bomb() -> None:
    result = await _bomb(Limits(processes=64), "bomb() { bomb | bomb & }; bomb 2>/dev/null; sleep 1000", timeout_s=2)
    assert result.limit == "processes"


async def test_threads_count_as_processes() -> None:
    python = (
        "import threading as t, time\nfor _ in range(500): t.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    )
    result = await _bomb(Limits(processes=64), f"exec python3 -c '{python}'")
    assert not result.ok
    assert "can't start new thread" in result.error_text


async def test_a_memory_bomb() -> None:
    bomb = "head -c 3000000000 /dev/zero | tail -c 3000000000 > /dev/null; exit ${PIPESTATUS[1]}"
    result = await _bomb(Limits(memory_bytes=128 * MIB), bomb)
    assert result.limit == "memory"


async def test_a_memory_bomb_of_many_processes() -> None:
    bomb = (
        "for i in 1 2 3 4; do head -c 60000000 /dev/zero | tail -c 60000000 | { sleep 2; cat; } >/dev/null & done; wait"
    )
    result = await _bomb(Limits(memory_bytes=96 * MIB), f"{bomb}; exit 1")
    assert result.limit == "memory"


async def test_a_file_that_fills_the_disk() -> None:
    result = await _bomb(Limits(disk_bytes=64 * MIB), "cat /dev/zero > big")
    assert result.limit == "disk"


async def test_files_that_fill_the_disk() -> None:
    fill = "i=0; while :; do i=$((i + 1)); head -c 5000000 /dev/zero > f$i; done"
    limits = Limits(disk_bytes=64 * MIB)
    async with _neighbours(limits) as sandbox:
        result = await sandbox.run(fill)
        size = sum(entry.size for entry in await sandbox.files.list())
        await _goes_on(sandbox)
    assert result.limit == "disk"
    assert size < 3000 * MIB  # what is written between two looks, at the speed of this disk


async def test_files_that_fill_the_table_of_files() -> None:
    result = await _bomb(Limits(inodes=2000), "i=0; while :; do : > f$((i++)); done")
    assert result.limit == "disk"


@pytest.mark.parametrize("place", ["/tmp", "/cache", "/dev/shm"])
async def test_filling_its_own_folders_in_memory(place: str) -> None:
    limits = Limits(tmp_bytes=16 * MIB, cache_bytes=16 * MIB, shm_bytes=16 * MIB)
    result = await _bomb(limits, f"cat /dev/zero > {place}/big || exit 7")
    assert "No space left on device" in result.error_text
    assert (result.exit.code, result.limit) == (7, None)


@pytest.mark.parametrize("place", ["/tmp", "/cache", "/dev/shm"])
async def test_empty_files_without_end_in_its_own_folders_in_memory(place: str) -> None:
    async with _neighbours(Limits(inodes=5000)) as sandbox:
        result = await sandbox.run(f"cd {place}; i=0; while :; do : > f$((i++)); done")
        assert result.limit == "disk"
        assert (await sandbox.run(f"find {place} -delete 2>/dev/null; sleep 0.3; echo clean")).stdout == b"clean\n"


async def test_a_hundred_thousand_open_files() -> None:
    before = _open_files_of_the_host()
    many = "for i in $(seq 100000); do exec {fd}</dev/null || exit 7; done"
    result = await _bomb(Limits(open_files=4096), many)
    assert "Too many open files" in result.error_text
    assert (result.exit.code, result.limit) == (7, None)
    assert _open_files_of_the_host() - before < 50_000


async def test_a_gigabyte_of_output() -> None:
    async with _neighbours(Limits()) as sandbox:
        before = _resident_bytes()
        watching = asyncio.ensure_future(_highest_resident())
        result = await sandbox.run("head -c 1073741824 /dev/zero; echo end >&2")
        watching.cancel()
        job = await sandbox.background("head -c 1073741824 /dev/zero")
        assert (await job.wait()).code == 0
        assert _resident_bytes() - before < 128 * MIB
    assert (result.limit, result.truncated, len(result.stdout)) == ("output", True, Limits().output_bytes)
    assert (result.stderr, result.exit.code) == (b"end\n", 0)


async def test_a_busy_loop() -> None:
    bomb = "for i in $(seq 16); do while :; do :; done & done; wait"
    result = await _bomb(Limits(cpus=0.5), bomb, timeout_s=2)
    assert result.limit == "time"


async def test_a_busy_loop_gets_the_share_it_may_have(held_by: str) -> None:
    if held_by == "watcher":
        pytest.skip("without a control group nothing holds the share of the processor: `skep doctor` says so")
    async with Sandbox.create(limits=Limits(cpus=0.25)) as sandbox:
        began = time.monotonic()
        result = await sandbox.run("while :; do :; done", timeout_s=2)
        took = time.monotonic() - began
    assert result.exit.cpu_s < 0.25 * took + 0.3


async def test_a_limit_reached_by_one_command_is_not_blamed_on_the_next() -> None:
    async with Sandbox.create(limits=Limits(memory_bytes=512 * MIB, processes=64)) as sandbox:
        await sandbox.run("head -c 3000000000 /dev/zero | tail -c 3000000000 > /dev/null; exit 0")
        assert (await sandbox.run("exit 1")).limit is None
        forks = "import os, time\ntry:\n  while os.fork(): pass\n  time.sleep(1000)\nexcept OSError: pass"
        assert (await sandbox.run(["python3", "-c", forks])).ok
        await sandbox.kill_all()
        await eventually(lambda: _is_empty(sandbox))
        assert (await sandbox.run("exit 1")).limit is None


async def _is_empty(sandbox: Sandbox) -> bool:
    return int((await sandbox.run("ls -d /proc/[0-9]* | wc -l")).text) < 10


async def _highest_resident() -> None:
    while True:
        assert _resident_bytes() < 1024 * MIB
        await asyncio.sleep(0.02)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _open_files_of_the_host() -> int:
    return int(Path("/proc/sys/fs/file-nr").read_text().split()[0])
