"""The one place where an error of the file system becomes one of Skep's."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from skep.errors import InvalidRequest, StorageFull, Unavailable, WorkspaceDamaged

P = ParamSpec("P")
T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHUT = (errno.EROFS, errno.EACCES, errno.EPERM)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise what the file system refuses as an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise _explanation(what, error) from error


def _explanation(what: str, error: OSError) -> StorageFull | Unavailable | WorkspaceDamaged | InvalidRequest:
    if error.errno in _FULL:
        return StorageFull(f"no room is left for {what}", hint="free some space and try again; nothing was changed")
    if error.errno in _SHUT:
        return Unavailable(
            f"{what} cannot be written: {error.strerror}", hint="make it writable for this user and try again"
        )
    if error.errno in _GONE:
        return WorkspaceDamaged(
            f"{what} was removed or moved: {error.filename or error.strerror}",
            hint="`skep workspace health` says what is there and what is missing",
        )
    if error.errno == errno.ENAMETOOLONG:
        return InvalidRequest(f"{what} has a path that is too long", hint="move those files up, or shorten their names")
    return Unavailable(f"the disk failed under {what}: {error.strerror}", hint="check the disk, then try again")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do slow work on files in a thread. Who is cancelled waits for its end: it may hold what others wait for."""
    return await whole(asyncio.to_thread(work, *args, **kwargs))


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Do something to its end. Who is cancelled in the middle is so when it is done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
