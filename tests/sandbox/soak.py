"""Use sandboxes much, in a process of its own, and compare what it holds of the host before and after.

python -m tests.sandbox.soak commands|sandboxes
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from skep.errors import InvalidRequest
from skep.sandbox.bubblewrap import BubblewrapSandbox
from skep.sandbox.launcher import spare
from skep.sandbox.leftovers import sweep_once
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox, Size

COMMANDS, SANDBOXES, AT_ONCE = 2_000, 200, 8
SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this process has of the host."""

    fds: Counter[str]
    children: frozenset[int]
    mounts: frozenset[str]
    threads: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        return cls(
            Counter(_open_files()),
            frozenset(_children()),
            frozenset(line.split(" - ")[0] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
            frozenset(thread.name for thread in threading.enumerate() if thread.name.startswith("skep")),
        )


def _open_files() -> list[str]:
    """Return what each descriptor is open on; the number that tells one pipe from another does not matter."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(fd.readlink()).partition("[")[0])
    return found


def _children() -> list[int]:
    """Return the processes whose parent is this one, ended but uncollected ones too."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(path.name))
    return found


@dataclass(slots=True)
class Traces:
    """Every record, control group and folder that the sandboxes of this test had on the host."""

    paths: set[Path] = field(default_factory=set)

    def keep(self, sandbox: Sandbox) -> None:
        assert isinstance(sandbox, BubblewrapSandbox)
        launcher = sandbox.launcher
        self.paths.add(launcher.record.path)
        self.paths.update(Path(folder) for folder, _ in launcher.group.folders.values())
        if launcher.record.throwaway is not None:
            self.paths.add(Path(launcher.record.throwaway[0]))

    def left(self) -> list[Path]:
        return [path for path in self.paths if path.exists()]


async def use(sandbox: Sandbox, number: int) -> None:
    """Do one of the things that a sandbox is used for; each leaves by another door."""
    match number % 10:
        case 0:
            assert (await sandbox.run("cat", input=b"x" * 100_000)).stdout == b"x" * 100_000
        case 1:
            assert (await sandbox.run("exit 3")).exit_code == 3
        case 2:
            assert (await sandbox.run("sleep 100 & kill -9 $$")).exit.signal == 9
        case 3:
            assert (await sandbox.run("sleep 100", timeout_s=0.01)).limit == "time"
        case 4:
            with pytest.raises(InvalidRequest):
                await sandbox.run(["/no/such/program"])
        case 5:
            process = await sandbox.start("tty", terminal=Size())
            assert b"/dev/pts/" in await process.stdout.read()
            await process.wait()
            process.release()
        case 6:
            process = await sandbox.start("yes")
            await process.stdout.read()
            await process.kill()
            await process.wait()
            process.release()
        case 7:
            running = asyncio.create_task(sandbox.run("sleep 100"))
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        case 8:
            await sandbox.files.write(f"file-{number}", b"text" * 1000)
            assert (await sandbox.run(["cat", f"file-{number}"])).stdout == await sandbox.files.read(f"file-{number}")
            await sandbox.files.remove(f"file-{number}")
        case _:
            assert (await sandbox.run(["/bin/true"])).ok


async def live(traces: Traces, folder: Path, number: int) -> None:
    """Live one sandbox's life; every fourth has a folder of its own, and every fifth dies with a daemon inside."""
    async with Sandbox.create(folder / str(number) if number % 4 == 0 else None) as sandbox:
        traces.keep(sandbox)
        assert (await sandbox.run("echo $((6 * 7))")).text == "42\n"
        if number % 5 == 0:
            await sandbox.run("setsid sleep 1000 > /dev/null 2>&1 &")
            await sandbox.background("yes")


async def at_once(act: Callable[[int], Awaitable[None]], numbers: Iterable[int]) -> None:
    """Act for each number, a few at a time."""
    left = iter(numbers)

    async def work() -> None:
        for number in left:
            await act(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


async def settled(before: Holdings) -> Holdings:
    """Return what is held once it is what was held before, or when time is up."""
    deadline = time.monotonic() + SETTLE_S
    while (now := Holdings.now()) != before and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return now


def compare(now: Holdings, before: Holdings) -> None:
    more, less = now.fds - before.fds, before.fds - now.fds
    assert now == before, f"now {now}\nbefore {before}\nmore open: {more}, less open: {less}"


async def inside(sandbox: Sandbox) -> set[str]:
    """Return the processes inside once those that have ended are collected, or when time is up."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        looked = await sandbox.start(["/bin/ls", "/proc"])
        listed = b"".join([chunk async for chunk in looked.stdout]).decode().split()
        looked.release()
        found = {"self" if name == str(looked.pid) else name for name in listed if name.isdigit()}
        if len(found) <= 2 or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.01)


async def warm_up() -> None:
    """Let everything be there that a process makes once: threads, cached look-ups, the blocking loop's own files."""
    async with Sandbox.create() as sandbox:
        await at_once(partial(use, sandbox), range(80))
    spare().drop()
    await asyncio.to_thread(sweep_once().join)


async def soak_commands() -> None:
    """No descriptor, process, thread or mount of the host is left, and no process inside."""
    await warm_up()
    outside = Holdings.now()
    traces = Traces()
    async with Sandbox.create(limits=Limits(processes=300)) as sandbox:
        traces.keep(sandbox)
        assert (await sandbox.run("true")).ok
        spare().drop()  # it is made in the background: the count must not depend on how far it is
        before = Holdings.now()
        await at_once(partial(use, sandbox), range(COMMANDS))
        compare(await settled(before), before)
        await sandbox.kill_all()
        assert await inside(sandbox) == {"1", "self"}, "the agent and the one that looks"
    spare().drop()
    compare(await settled(outside), outside)
    assert not traces.left()


async def soak_sandboxes(folder: Path) -> None:
    """No descriptor, process, thread, mount, control group, record or folder is left."""
    await warm_up()
    before = Holdings.now()
    traces = Traces()
    await at_once(partial(live, traces, folder), range(SANDBOXES))
    spare().drop()
    assert len(traces.paths) >= SANDBOXES
    compare(await settled(before), before)
    assert not traces.left()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="skep-soak-") as place:
        asyncio.run(soak_commands() if sys.argv[1] == "commands" else soak_sandboxes(Path(place)))
