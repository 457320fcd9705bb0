"""Limits that no kernel holds here: memory and processes of everything together, and the room that the home takes.

The warden looks ten times a second while commands run, or less often where looking is dear. Looking at the disk is
cheap (how much room its file system has left); the home is counted when enough room has gone to matter, and now and
then in any case: whoever else frees room there would hide what is taken here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from skep.sandbox.twin.inside.family import Family, memory_of, send
from skep.sandbox.twin.inside.loop import Loop
from skep.sandbox.twin.inside.paths import Root
from skep.sandbox.twin.inside.wire import MEMORY, PROCESSES

_LOOK_S, _IDLE_LOOK_S = 0.1, 1.0
#: Looking takes no more than this part of the time.
_SHARE = 30
_COUNT_S = 2.0
#: Growth that is let pass without counting, and that a home over its limit may still have (to clean up).
_SLACK_BYTES = 8 << 20
_SLACK_INODES = 1000
_SIGKILL = 9


class Usage(NamedTuple):
    """Room taken or left, in bytes and in files."""

    size: int
    inodes: int


class Warden:
    """Looks after one sandbox from the moment it is told the limits."""

    def __init__(self, loop: Loop, root: Root, family: Family, limits: dict[str, int]) -> None:
        self._loop = loop
        self._root = root
        self._family = family
        self._limits = limits
        self._room: Usage | None = None
        self._used = self._least = Usage(0, 0)
        self._count_at = 0.0
        self._counting = False
        #: How often something was ended for memory, and how often there were as many processes as may be.
        self.memory_kills = 0
        self.full_houses = 0
        #: Says whether commands run, and ends them all because of the disk.
        self.busy: Callable[[], bool] = lambda: False
        self.disk_full: Callable[[], None] = lambda: None

    def look(self) -> None:
        began = time.monotonic()
        busy = self.busy()
        if busy:
            self._look_at_processes()
            self._look_at_disk()
        took = time.monotonic() - began
        self._loop.later(max(_LOOK_S if busy else _IDLE_LOOK_S, _SHARE * took), self.look)

    def tally(self) -> tuple[int, int]:
        return self.memory_kills, self.full_houses

    def judge(self, before: tuple[int, int]) -> int:
        """Name the limit that a command met which failed, from what was counted since it started."""
        self._count_processes(len(self._family.living()))
        if self.memory_kills > before[0]:
            return MEMORY
        return PROCESSES if self.full_houses > before[1] else 0

    def _look_at_processes(self) -> None:
        use = {kin: memory_of(kin.pid) for kin in self._family.living()}
        self._count_processes(len(use))
        if sum(use.values()) > self._limits["memory"]:
            self.memory_kills += 1
            send(max(use, key=use.__getitem__), _SIGKILL)

    def _count_processes(self, there: int) -> None:
        # In a bomb some are always just going.
        if there >= self._limits["processes"] * 0.9 - 1:
            self.full_houses += 1

    def _look_at_disk(self) -> None:
        try:
            home = self._root.open(self._root.inside(b"."), os.O_PATH | os.O_DIRECTORY)
        except OSError:
            return
        try:
            found = os.statvfs(home)
        finally:
            os.close(home)
        now = Usage(found.f_bavail * found.f_frsize, found.f_favail)
        room = self._room or now
        left = Usage(self._limits["disk"] - self._used.size, self._limits["inodes"] - self._used.inodes)
        grown = room.size - now.size >= max(left.size // 2, _SLACK_BYTES)
        grown = grown or room.inodes - now.inodes >= max(left.inodes // 2, _SLACK_INODES)
        if not self._counting and (grown or self._room is None or time.monotonic() >= self._count_at):
            self._counting = True
            self._room = now
            self._loop.in_thread(self._counted, self._take_stock)

    def _counted(self) -> Any:
        began = time.monotonic()
        try:
            home = self._root.open(self._root.inside(b"."), os.O_PATH | os.O_DIRECTORY)
        except OSError:
            return self._used
        from skep.sandbox.census import Census  # which takes long to load

        try:
            found = Census.take(home)
            return Usage(found.size, found.inodes)
        except OSError:
            return self._used
        finally:
            os.close(home)
            self._count_at = time.monotonic() + max(_COUNT_S, _SHARE * (time.monotonic() - began))

    def _take_stock(self, used: Usage) -> None:
        """Compare with the limit, reckoned from the least there was: past the last count one could creep on."""
        least = used if self._least == Usage(0, 0) else self._least
        self._least = least = Usage(min(least.size, used.size), min(least.inodes, used.inodes))
        self._used, self._counting = used, False
        too_large = used.size > max(self._limits["disk"], least.size + _SLACK_BYTES)
        if too_large or used.inodes > max(self._limits["inodes"], least.inodes + _SLACK_INODES):
            self.disk_full()
