"""Go down and up in a folder tree that somebody hostile has made.

One descriptor stands in one folder at a time, so a tree may be of any depth. A link is never followed, and a folder
that its owner, this user, has shut to itself is opened for as long as the cursor stands in or below it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_LOOKABLE = 0o500

T = TypeVar("T")


@dataclass(slots=True)
class _Step:
    """A folder on the way down: which it is, and the mode to give back when the cursor leaves it."""

    identity: tuple[int, int]
    mode: int | None


class Cursor:
    """Stands in one folder of a tree; `fd` is that folder, for calls that take a `dir_fd`."""

    __slots__ = ("_trail", "fd", "top")

    def __init__(self, top: str) -> None:
        """Stand in the uppermost folder; its name may lead through links, as the caller is trusted to know it."""
        self.top = top
        self._trail: list[_Step] = []
        place = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fd = self._stand(place)
        finally:
            os.close(place)

    @property
    def depth(self) -> int:
        return len(self._trail) - 1

    def down(self, name: str) -> None:
        """Go into a folder in this one."""
        place = self._willing(lambda: os.open(name, _PLACE | os.O_DIRECTORY, dir_fd=self.fd))
        try:
            below = self._stand(place)
        finally:
            os.close(place)
        os.close(self.fd)
        self.fd = below

    def up(self) -> None:
        """Go back to the folder above; OSError (ESTALE) if it has been moved since the way down."""
        above = self._willing(lambda: os.open("..", _FOLDER, dir_fd=self.fd))
        found = os.fstat(above)
        self._shut(self._trail.pop())
        os.close(self.fd)
        self.fd = above
        if (found.st_dev, found.st_ino) != self._trail[-1].identity:
            raise OSError(errno.ESTALE, "a folder was moved while it was read", self.top)

    def close(self) -> None:
        """Leave the tree, giving back the modes of what was opened up."""
        try:
            while any(step.mode is not None for step in self._trail[:-1]):
                self.up()
            self._shut(self._trail[-1])
        finally:
            os.close(self.fd)

    def names(self) -> list[str]:
        return os.listdir(self.fd)  # noqa: PTH208

    def look(self, name: str) -> os.stat_result | None:
        """Describe what a name in this folder stands for; None if it is gone by now."""
        try:
            return self._willing(lambda: os.stat(name, dir_fd=self.fd, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def open(self, name: str) -> int:
        """Open a regular file in this folder for reading, also one that its owner may not read."""
        return self._willing(lambda: open_at(self.fd, name))

    def _willing(self, act: Callable[[], T]) -> T:
        """Do something in this folder, and again if another cursor, on leaving, has shut it in the meantime."""
        try:
            return act()
        except PermissionError:
            mode = stat.S_IMODE(os.fstat(self.fd).st_mode)
            if mode & _LOOKABLE == _LOOKABLE:
                raise
            self._trail[-1].mode = mode
            os.fchmod(self.fd, mode | _LOOKABLE)
            return act()

    def _stand(self, place: int) -> int:
        found = os.fstat(place)
        if found.st_mode & _LOOKABLE == _LOOKABLE or found.st_uid != os.geteuid() or found.st_uid == 0:
            opened, mode = os.open(".", _FOLDER, dir_fd=place), None
        else:
            opened, mode = _open_up(place, found), stat.S_IMODE(found.st_mode)
        self._trail.append(_Step((found.st_dev, found.st_ino), mode))
        return opened

    def _shut(self, step: _Step) -> None:
        if step.mode is not None:
            os.fchmod(self.fd, step.mode)


def _open_up(place: int, found: os.stat_result) -> int:
    """Open a folder and leave it open to its owner."""
    path = Path(f"/proc/self/fd/{place}")
    path.chmod(stat.S_IMODE(found.st_mode) | _LOOKABLE)
    try:
        return os.open(".", _FOLDER, dir_fd=place)
    except OSError:
        path.chmod(stat.S_IMODE(found.st_mode))
        raise


def open_at(folder: int, name: str) -> int:
    """Open a regular file in an open folder for reading, also one that its owner, this user, may not read.

    Its mode is changed by descriptor and only for as long as it takes. What is not a regular file is refused (EINVAL):
    to open a pipe or a device is an act in itself.
    """
    try:
        opened = os.open(name, _FILE, dir_fd=folder)
    except PermissionError:
        opened = _open_shut(folder, name)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return opened
    os.close(opened)
    raise OSError(errno.EINVAL, "not a regular file", name)


def _open_shut(folder: int, name: str) -> int:
    place = os.open(name, _PLACE, dir_fd=folder)
    try:
        found = os.fstat(place)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        path = Path(f"/proc/self/fd/{place}")
        path.chmod(stat.S_IMODE(found.st_mode) | 0o400)
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            path.chmod(stat.S_IMODE(found.st_mode))
    finally:
        os.close(place)


def extended(place: int | str, name: str) -> bytes | None:
    """Return an extended attribute of an open file, or of a path whose last part is not followed."""
    try:
        if isinstance(place, int):
            return os.getxattr(place, name)
        return os.getxattr(place, name, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOENT, errno.EACCES):
            raise
        return None
