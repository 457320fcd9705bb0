"""Limits that the kernel does not hold here: disk use of the workspace; memory where there is no control group.

The watcher looks ten times a second while commands run. Looking is cheap (how much room the file system has left);
the folder is measured when enough room has gone to matter, with everything inside halted if the limit may have been
passed. It is measured now and then in any case: whoever else frees room there would hide what is taken here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import time
from collections.abc import Awaitable, Callable, Iterator

from skep.errors import SandboxLost
from skep.sandbox.agent import PAUSE, RESUME, Agent
from skep.sandbox.census import Census, Usage
from skep.sandbox.guest import Guest
from skep.sandbox.limits import Limits
from skep.sandbox.population import processes
from skep.sandbox.process import AgentProcess
from skep.sandbox.tree import Tree

_LOOK_S = 0.1
_IDLE_LOOK_S = 1.0
#: Growth that is let pass without measuring, and that a workspace over its limit may still have (to clean up).
_SLACK_BYTES = 8 << 20
_SLACK_INODES = 1000
#: The folder is counted this often in any case, or less if a count takes more than its share of the time.
_COUNT_S = 2.0
_COUNT_SHARE = 20


class Watcher:
    """Watches one sandbox from its first command to its end."""

    def __init__(self, agent: Agent, files: Tree, limits: Limits, *, watch_memory: bool) -> None:
        self._agent = agent
        self._files = files
        self._limits = limits
        self._watch_memory = watch_memory
        self._running: set[AgentProcess | Guest] = set()
        self._task: asyncio.Task[None] | None = None
        self._upper = -1
        self._upper_path = ""
        #: The folders that were written before and are sealed now, with what they hold once that is counted.
        self._sealed: dict[str, Usage | None] = {}
        self._usage: Usage | None = None
        self._room = Usage(0, 0)
        #: The least the workspace has held, from which growth past the limit is reckoned; and when to count again.
        self._least: Usage | None = None
        self._count_at = 0.0
        self._in_memory = 0
        #: Somebody has paused the sandbox: nothing in it moves, and measuring must not set it going again.
        self.paused = False
        #: How often a process was ended for memory, and how often there were as many as may be.
        self.memory_kills = 0
        self.full_houses = 0

    def count_in(self, upper: str) -> None:
        """Count this folder of the host, which is written, and those that were before it; but no layer of others'."""
        self._forget_upper()
        if self._upper_path:
            self._sealed[self._upper_path] = None
        self._sealed.pop(upper, None)
        self._upper_path = upper
        self._upper = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._usage = None  # but not the least: each seal would allow as much again

    def _forget_upper(self) -> None:
        if self._upper >= 0:
            os.close(self._upper)
        self._upper = -1

    def watch(self, process: AgentProcess | Guest) -> None:
        self._running.add(process)
        if self._task is None:
            self._task = asyncio.create_task(self._look_on())
            self._task.add_done_callback(self._stopped_looking)

    def _stopped_looking(self, task: asyncio.Task[None]) -> None:
        """End the sandbox if it cannot be watched any more: a limit that nobody holds is none."""
        if not task.cancelled() and task.exception() is not None:
            self._agent.close()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._forget_upper()

    async def _look_on(self) -> None:
        with contextlib.suppress(SandboxLost):
            while True:
                self._running = {process for process in self._running if process.exit is None}
                if not self.paused:
                    await self._look_at_disk()
                    await self._look_at_memory_folders()
                    if self._watch_memory:
                        await self._look_at_processes()
                await asyncio.sleep(_LOOK_S if self._running else _IDLE_LOOK_S)

    async def _look_at_disk(self) -> None:
        room = self._files.room()
        if self._usage is None:
            self._usage = await self._counted()
            self._room = room
            if self._is_over(self._usage):
                await self._halted(self._measure)
                return
        taken = Usage(self._room.size - room.size, self._room.inodes - room.inodes)
        left = Usage(self._limits.disk_bytes - self._usage.size, self._limits.inodes - self._usage.inodes)
        grown = taken.size >= max(left.size // 2, _SLACK_BYTES) or taken.inodes >= max(left.inodes // 2, _SLACK_INODES)
        if grown or (time.monotonic() >= self._count_at and self._is_over(await self._counted())):
            await self._halted(self._measure)

    async def _measure(self) -> None:
        self._room = self._files.room()
        self._usage = await self._counted()
        if self._is_over(self._usage):
            await self._end_all()

    async def _counted(self) -> Usage:
        """Count what the workspace holds, and put off the next count for as long as this one's cost asks for."""
        began = time.monotonic()
        held = await self._files.examine(_held_open)
        if self._upper < 0:
            now = held + await self._files.measure()
        else:
            now = held + await _census(os.dup(self._upper)) + await self._counted_sealed()
        self._count_at = time.monotonic() + max(_COUNT_S, _COUNT_SHARE * (time.monotonic() - began))
        return now

    async def _counted_sealed(self) -> Usage:
        """Count what was sealed since the sandbox started: once each, since it does not change, though it may go."""
        total = Usage(0, 0)
        for path, known in list(self._sealed.items()):
            try:
                folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                del self._sealed[path]
                continue
            if known is None:
                self._sealed[path] = held = await _census(folder)
            else:
                os.close(folder)
                held = known
            total += held
        return total

    def _is_over(self, now: Usage) -> bool:
        # Reckoned from the least and not from the last count, past which one could creep on step by step.
        least = self._least or now
        self._least = least = Usage(min(least.size, now.size), min(least.inodes, now.inodes))
        too_large = now.size > max(self._limits.disk_bytes, least.size + _SLACK_BYTES)
        return too_large or now.inodes > max(self._limits.inodes, least.inodes + _SLACK_INODES)

    async def _look_at_memory_folders(self) -> None:
        """Hold the number of files in folders that the kernel limits in size alone: each takes memory of its own."""
        now = await self._files.examine(_files_in_memory)
        if now > max(self._limits.inodes, self._in_memory + _SLACK_INODES):
            await self._end_all()
        self._in_memory = now if now > self._limits.inodes else 0

    async def _end_all(self) -> None:
        for process in self._running:
            process.stop_for("disk")
        await self._agent.signal_inside(-1, signal.SIGKILL)

    async def _halted(self, work: Callable[[], Awaitable[None]]) -> None:
        await self._agent.ask(PAUSE)
        try:
            await work()
        finally:
            if not self.paused:
                await self._agent.ask(RESUME)

    def look_now(self) -> None:
        """Look how many processes there are: a command that failed for want of another has ended in between."""
        if self._watch_memory:
            with processes(self._files.root_fd) as (_, pids):
                self._count_processes(len(pids))

    def _count_processes(self, there: int) -> None:
        # The agent is one more, and in a bomb some are always just going.
        if there >= self._limits.processes * 0.9 - 1:
            self.full_houses += 1

    async def _look_at_processes(self) -> None:
        use = await self._files.examine(lambda root_fd: dict(_memory_by_process(root_fd)))
        self._count_processes(len(use))
        if sum(use.values()) > self._limits.memory_bytes:
            self.memory_kills += 1
            await self._agent.signal_inside(max(use, key=use.__getitem__), signal.SIGKILL)


async def _census(folder: int) -> Usage:
    def counted() -> Usage:
        try:
            return Census.take(folder)
        finally:
            os.close(folder)

    return await asyncio.to_thread(counted)


def _files_in_memory(root_fd: int) -> int:
    return sum(_inodes(root_fd, folder) for folder in ("tmp", "cache", "dev/shm"))


def _inodes(root_fd: int, folder: str) -> int:
    try:
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    except OSError:
        return 0  # the sandbox is going
    try:
        found = os.statvfs(fd)
    finally:
        os.close(fd)
    return found.f_files - found.f_ffree


def _held_open(root_fd: int) -> Usage:
    """Count the files that have no name any more but take room for as long as somebody inside holds them open."""
    found: dict[tuple[int, int], int] = {}
    with processes(root_fd) as (proc, pids):
        for pid in pids:
            with contextlib.suppress(OSError):
                folder = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
                try:
                    found.update(_nameless(folder))
                finally:
                    os.close(folder)
    return Usage(sum(found.values()), len(found))


def _nameless(fds: int) -> Iterator[tuple[tuple[int, int], int]]:
    for name in os.listdir(fds):
        with contextlib.suppress(OSError):
            held = os.stat(name, dir_fd=fds)
            if held.st_nlink == 0 and stat.S_ISREG(held.st_mode):
                yield (held.st_dev, held.st_ino), held.st_blocks * 512


def _memory_by_process(root_fd: int) -> Iterator[tuple[int, int]]:
    """Yield the processes inside with the memory that is theirs alone, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    with processes(root_fd) as (proc, pids):
        for pid in pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fd = os.open(f"{pid}/statm", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
                try:
                    _, resident, shared, *_ = os.read(fd, 256).split()
                finally:
                    os.close(fd)
                yield pid, (int(resident) - int(shared)) * page
