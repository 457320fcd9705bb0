"""Locks between processes: who holds a workspace, and who makes or drops references to trees.

The kernel drops a lock when its holder dies, so nothing has to be cleaned up after one. A lock file may be removed
together with its folder; whoever has waited for it then holds a lock on nothing, notices, and begins again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path

from skep.errors import Unavailable, WorkspaceBusy
from skep.workspace.faults import explained

_PAUSE_S = 0.005
_WAIT_S = 60.0


class Taken(WorkspaceBusy):
    """Another holder has the lock."""


class Holding:
    """The lock on one workspace, held until it is closed."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self._fd = fd
        _held().add(self)

    @classmethod
    def take(cls, folder: Path, *, make: bool = False) -> Holding:
        """Lock the workspace in a folder, or raise `Taken` that names who has it.

        With `make` a folder that is not there is made; without it that is FileNotFoundError.
        """
        path = folder / "lock"
        while True:
            if make:
                folder.mkdir(mode=0o700, exist_ok=True)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                if make:
                    continue  # swept away in between
                raise
            try:
                _lock(fd, folder)
            except BaseException:
                os.close(fd)
                raise
            holding = cls(folder, fd)
            if holding.valid():
                with suppress(OSError):  # who holds it is good to know, but the lock holds without
                    os.pwrite(fd, str(os.getpid()).encode().ljust(20), 0)
                return holding
            holding.close()

    def valid(self) -> bool:
        """Tell whether the folder that was locked is still the one at its path."""
        with suppress(OSError):
            return os.path.samestat((self.folder / "lock").lstat(), os.fstat(self._fd))
        return False

    def close(self) -> None:
        """Let go at once, whatever child on its way to another program still has a copy of the descriptor."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close this process's descriptor; whoever has another one of the same lock keeps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
        raise Taken(
            f"workspace {folder.name} is held by process {holder}",
            hint="wait until it ends, or let that process do it",
        ) from None


@cache
def _held() -> weakref.WeakSet[Holding]:
    """Return what this process holds. A forked child has copies of the descriptors, and lets go of them."""
    holdings: weakref.WeakSet[Holding] = weakref.WeakSet()

    def let_go() -> None:
        for holding in list(holdings):
            holding.forget()

    os.register_at_fork(after_in_child=let_go)
    return holdings


@asynccontextmanager
async def referring(lock: Path) -> AsyncIterator[None]:
    """Keep trees from being collected while references to them are made."""
    fd = _opened(lock)
    try:
        deadline = time.monotonic() + _WAIT_S
        while not _granted(fd, fcntl.LOCK_SH):
            _check(deadline, lock)
            await asyncio.sleep(_PAUSE_S)
        yield
    finally:
        os.close(fd)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until nobody makes references to trees, and keep it so."""
    fd = _opened(lock)
    try:
        deadline = time.monotonic() + _WAIT_S
        while not _granted(fd, fcntl.LOCK_EX):
            _check(deadline, lock)
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(fd)


def _opened(lock: Path) -> int:
    with explained(str(lock)):
        lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _granted(fd: int, way: int) -> bool:
    try:
        fcntl.flock(fd, way | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check(deadline: float, lock: Path) -> None:
    if time.monotonic() > deadline:
        raise Unavailable(f"{lock} has been held for {_WAIT_S:.0f} s", hint="find the process that holds it and end it")
