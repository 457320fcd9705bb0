"""Turns of processes that share a folder, by locks that the kernel drops when their holder dies."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from skep.workspace.faults import explained

_PAUSE_S = 0.05


@asynccontextmanager
async def turn(lock: Path, *, alone: bool, on_wait: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
    """Wait for a turn, however long that takes: alone, or together with all others that do not ask to be alone."""
    with _opened(lock) as fd:
        if not _granted(fd, alone=alone):
            on_wait()
            while not _granted(fd, alone=alone):  # noqa: ASYNC110 - the others are processes
                await asyncio.sleep(_PAUSE_S)
        yield


@contextmanager
def moment(lock: Path) -> Iterator[None]:
    """Be alone for a moment. Nobody may hold this lock for longer than it takes to change a few names."""
    with _opened(lock) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield


@contextmanager
def shared(lock: Path) -> Iterator[int]:
    """Hold a lock together with others, and give it; whoever wants it alone does so for a moment or not at all."""
    with _opened(lock) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield fd


@contextmanager
def chance(lock: Path) -> Iterator[bool]:
    """Say whether nobody has a turn and, if so, keep it so."""
    with _opened(lock) as fd:
        yield _granted(fd, alone=True)


@contextmanager
def _opened(lock: Path) -> Iterator[int]:
    with explained(str(lock)):
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _granted(fd: int, *, alone: bool) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
