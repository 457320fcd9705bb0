"""Count what a folder tree holds, whatever the agent has made of it.

`os.fwalk` goes down by recursion with a descriptor per level and passes over folders that it may not enter, so a tree
that is deep enough, or a folder with mode 000, would hide what is in it from the limit. Here one descriptor goes down
and up again, and a folder that its owner has shut is opened for as long as it is looked at.

It is part of the twin too, and so runs in Python 3.9, whose dataclasses know no slots.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOKABLE = 0o500


@dataclass(frozen=True)
class Usage:
    """Room taken or left, in bytes and in files."""

    size: int
    inodes: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.size + other.size, self.inodes + other.inodes)


@dataclass
class Census:
    """One count. A file with several names is counted once."""

    size: int = 0
    inodes: int = 0
    _trail: list[_Level] = field(default_factory=list)
    _several: set[int] = field(default_factory=set)

    @classmethod
    def take(cls, top: int) -> Usage:
        """Count what is below an open folder. What is moved away in the middle of it may be missed."""
        census = cls()
        here = census._look(_open_place(top))
        while census._trail:
            here = census._step(here)
        os.close(here)
        return Usage(census.size, census.inodes)

    def _step(self, here: int) -> int:
        """Go down into the next folder, or up when there is none; return where that leads."""
        level = self._trail[-1]
        if level.folders:
            below = _enter(here, level.folders.pop())
            if below is None:
                return here
            os.close(here)
            return self._look(below)
        self._trail.pop()
        up = _above(here, self._trail)
        if level.mode is not None:
            os.fchmod(here, level.mode)
        if up is None:
            self._trail.clear()
            return here
        os.close(here)
        return up

    def _look(self, folder: int) -> int:
        found = os.fstat(folder)
        level = _Level((found.st_dev, found.st_ino))
        self._trail.append(level)
        if found.st_mode & _LOOKABLE != _LOOKABLE and found.st_uid == os.geteuid():
            level.mode = stat.S_IMODE(found.st_mode)
            os.fchmod(folder, level.mode | _LOOKABLE)
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    self._count(entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        level.folders.append(entry.name)
        return folder

    def _count(self, found: os.stat_result) -> None:
        if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
            if found.st_ino in self._several:
                return
            self._several.add(found.st_ino)
        self.size += found.st_blocks * 512
        self.inodes += 1


@dataclass
class _Level:
    """A folder on the way down: which it is, what of it is still to be entered, the mode to give back."""

    identity: tuple[int, int]
    folders: list[str] = field(default_factory=list)
    mode: int | None = None


def _enter(here: int, name: str) -> int | None:
    try:
        place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    except OSError:
        return None  # gone, or something else by now
    try:
        return _open_place(place)
    finally:
        os.close(place)


def _open_place(place: int) -> int:
    """Open a folder to read; if its owner, this user, has shut it to itself, its mode is as it was afterwards."""
    path = f"/proc/self/fd/{place}"
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except PermissionError:
        mode = stat.S_IMODE(os.fstat(place).st_mode)
        os.chmod(path, mode | _LOOKABLE)
        try:
            return os.open(path, flags)
        finally:
            os.chmod(path, mode)


def _above(here: int, trail: list[_Level]) -> int | None:
    """Open the folder above, unless it is no longer the one that the way down came through."""
    if not trail:
        return None
    try:
        up = os.open("..", _FOLDER, dir_fd=here)
    except OSError:
        return None
    found = os.fstat(up)
    if (found.st_dev, found.st_ino) == trail[-1].identity:
        return up
    os.close(up)
    return None
