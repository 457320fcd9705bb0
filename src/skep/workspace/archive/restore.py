"""Restore a tree: fetch chunks ahead of need in several threads, check each, and write files in one.

The tree is written beside the place that it is meant for and moved there when it is complete and on the disk. What a
restore that was killed has left there is removed, and the tree written anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from skep.errors import ArchiveDamaged, Conflict, StorageFull, Unavailable
from skep.sandbox.erase import empty, erase
from skep.workspace.archive.chunks import Chunks
from skep.workspace.archive.folder import sync_folder
from skep.workspace.archive.index import Row, Rows, Tree, decode_rows
from skep.workspace.archive.planting import Planting
from skep.workspace.archive.watch import Watch

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_AHEAD = 8
_KEPT = 24

_libc = ctypes.CDLL(None, use_errno=True)


class Pantry:
    """Chunks that were fetched ahead of need, or may be needed once more."""

    def __init__(self, chunks: Chunks, watch: Watch, pool: ThreadPoolExecutor) -> None:
        self._chunks = chunks
        self._watch = watch
        self._pool = pool
        self._fetched: OrderedDict[str, Future[bytes]] = OrderedDict()
        self._upcoming: deque[str] = deque()
        self._ahead: set[str] = set()

    def plan(self, chunks: Iterable[str]) -> None:
        """Say what will be taken next, in order."""
        self._upcoming.extend(chunks)

    def take(self, chunk: str) -> bytes:
        """Return a chunk, and have those fetched that come after it."""
        future = self._order(chunk)
        self._fetched.move_to_end(chunk)
        self._ahead.discard(chunk)
        while self._upcoming and len(self._ahead) < _AHEAD:
            following = self._upcoming.popleft()
            if following not in self._fetched:
                self._order(following)
                self._ahead.add(following)
        return future.result()

    def _order(self, chunk: str) -> Future[bytes]:
        future = self._fetched.get(chunk)
        if future is None:
            future = self._fetched[chunk] = self._pool.submit(self._fetch, chunk)
            while len(self._fetched) > _KEPT:
                self._ahead.discard(self._fetched.popitem(last=False)[0])
        return future

    def _fetch(self, chunk: str) -> bytes:
        self._watch.check()
        plain = self._chunks.get(chunk)
        self._watch.count(moved_bytes=len(plain))
        return plain


class Restoring:
    """One tree on its way out of a store."""

    def __init__(self, chunks: Chunks, tree: Tree, watch: Watch, *, lanes: int) -> None:
        self._tree = tree
        self._watch = watch
        self._pool = ThreadPoolExecutor(lanes, thread_name_prefix="skep-restore")
        self._pantry = Pantry(chunks, watch, self._pool)

    def into(self, folder: Path, *, owner: tuple[int, int] | None) -> None:
        """Write the tree as a new folder; Conflict if there is something by that name."""
        if os.path.lexists(folder):
            raise Conflict(f"there is something at {folder} already", hint="restore to a new place")
        with _explained(folder), _draft(folder) as (top, links):
            try:
                self._fill(top, links, owner)
            finally:
                self._pool.shutdown(wait=True, cancel_futures=True)
            _sync_all(top)
            _draft_of(folder).rename(folder)
            sync_folder(folder.parent)

    def _fill(self, top: int, links: int, owner: tuple[int, int] | None) -> None:
        planting = Planting(top, links, self._tree.named_again, owner=owner)
        try:
            for rows in self._runs():
                for row in rows.rows:
                    self._watch.check()
                    planting.add(row, self._content(row, rows))
                    if row.code == "file":
                        self._watch.count(files=1, size_bytes=row.size)
            planting.finish()
        finally:
            planting.close()

    def _runs(self) -> Iterator[Rows]:
        names = self._tree.rows
        for number, name in enumerate(names):
            self._pantry.plan(names[number + 1 : number + 2])
            rows = decode_rows(self._pantry.take(name), f"chunk {name}")
            self._pantry.plan(rows.chunks)
            yield rows

    def _content(self, row: Row, rows: Rows) -> Iterator[memoryview | int]:
        for place in range(0, len(row.extents) - 2, 3):
            number, offset, length = row.extents[place : place + 3]
            if offset < 0 or length < 0:
                raise ArchiveDamaged("a file has an extent of less than nothing", hint="restore an older version")
            if number < 0:
                yield length
                continue
            if number >= len(rows.chunks):
                raise ArchiveDamaged("a file is in a chunk that is not there", hint="restore an older version")
            plain = self._pantry.take(rows.chunks[number])
            if offset + length > len(plain):
                raise ArchiveDamaged(f"chunk {rows.chunks[number]} is too short", hint="restore an older version")
            yield memoryview(plain)[offset : offset + length]


def _sync_all(top: int) -> None:
    """Bring everything on the file system of an open folder to the disk: one call for any number of new files."""
    if _libc.syncfs(top) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _draft_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.restoring")


@contextlib.contextmanager
def _draft(folder: Path) -> Iterator[tuple[int, int]]:
    """Give two new folders beside a place, open: for the tree, and for the names it is linked by while it is made."""
    draft = _draft_of(folder)
    links = draft.with_name(f"{draft.name}-links")
    with _emptied(draft) as top, _emptied(links) as aside:
        yield top, aside


@contextlib.contextmanager
def _emptied(path: Path) -> Iterator[int]:
    """Give an empty folder that nobody else uses, open; it is removed at the end, unless it has been moved."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    fd = os.open(path, _FOLDER)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"somebody restores to {path} now", hint="wait until that is done") from None
        empty(fd)
        try:
            yield fd
        finally:
            erase(str(path), os.fstat(fd).st_ino)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                raise StorageFull(
                    f"no room left to restore {folder}", hint="free some room and restore again"
                ) from error
            case errno.EEXIST | errno.EINVAL | errno.ENAMETOOLONG | errno.EFBIG:
                what = f"{error.filename!r}: {reason}" if error.filename else reason
                raise ArchiveDamaged(
                    f"the archive has what no tree can have: {what}", hint="restore an older version"
                ) from error
            case _:
                raise Unavailable(
                    f"{folder} cannot be written: {reason}", hint="see that the folder above can be written"
                ) from error
