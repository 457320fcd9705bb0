"""Save a tree: read it once, in order, cut it into chunks, and describe it by rows.

One thread walks and reads; the others name, compress, encrypt and store. Files of a mebibyte and more are cut every
4 MiB. Smaller ones are put together, and where a group ends depends on the path of its last file, so that a new file
changes the group it falls into and not all that follow.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from skep.errors import WorkspaceBusy, WorkspaceDamaged
from skep.workspace.archive.chunks import Chunks
from skep.workspace.archive.index import Row, Tree, encode_rows, latin
from skep.workspace.archive.remembered import Extent, Remembered
from skep.workspace.archive.watch import Watch
from skep.workspace.overlay import Entry, Walk

CHUNK = 4 << 20
_SMALL = 1 << 20
_GROUP = 1 << 20
_ROWS = 4096
_SPARSE = 1 << 16
_OWN = "user.overlay."
#: What the kernel keeps for a user's own attribute of a name that it uses itself.
_ESCAPED = "user.overlay.overlay."
_CODES = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}


class Piece:
    """Content on its way into the store; its name is known when it is there."""

    __slots__ = ("chunk", "future")

    def __init__(self) -> None:
        self.future: Future[str] | None = None
        self.chunk: str | None = None

    def name(self) -> str:
        if self.chunk is None:
            assert self.future is not None
            self.chunk, self.future = self.future.result(), None
        return self.chunk


Part = tuple[Piece | str | None, int, int]


@dataclass(slots=True)
class _Run:
    """Rows that are kept in one chunk, with the parts of their files."""

    rows: list[Row] = field(default_factory=list)
    parts: list[list[Part]] = field(default_factory=list)
    stats: list[os.stat_result | None] = field(default_factory=list)


class Saving:
    """One tree on its way into a store."""

    def __init__(
        self, chunks: Chunks, remembered: Remembered, watch: Watch, *, renew: Callable[[], None], lanes: int
    ) -> None:
        self._chunks = chunks
        self._remembered = remembered
        self._watch = watch
        self._renew = renew
        self._pool = ThreadPoolExecutor(lanes, thread_name_prefix="skep-save")
        self._room = threading.BoundedSemaphore(lanes + 2)
        self._failure: BaseException | None = None
        self._group: list[bytes] = []
        self._grouped = 0
        self._piece = Piece()
        self._run = _Run()
        self._runs: list[_Run] = []
        self._first: dict[tuple[int, int], int] = {}
        self._named_again: set[int] = set()
        self._count = 0
        self._files = 0
        self._size = 0
        self._left_out = 0
        self._segments: list[Piece] = []
        self._needed: dict[str, None] = {}

    def tree(self, layers: Sequence[str], *, over: Sequence[str] | None) -> Tree:
        """Put everything that a stack shows into the store, and return what is needed to get it back."""
        try:
            with _explained(layers):
                self._top(layers[0])
                with Walk(layers, over=over) as walk:
                    for entry in walk:
                        self._watch.check()
                        self._add(walk, entry)
            self._end_run()
            return self._finish()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _top(self, layer: str) -> None:
        found = os.stat(layer)  # noqa: PTH116
        fd = os.open(layer, os.O_PATH | os.O_CLOEXEC)
        try:
            attributes = _attributes(f"/proc/self/fd/{fd}/.")
        finally:
            os.close(fd)
        row = Row("folder", 0, "", stat.S_IMODE(found.st_mode), found.st_mtime_ns, attributes=attributes)
        self._append(row, [], None)

    def _add(self, walk: Walk, entry: Entry) -> None:
        found, path = entry.stat, entry.path
        name, depth = path.rpartition("/")[2], path.count("/") + 1
        common = (depth, latin(name), stat.S_IMODE(found.st_mode), found.st_mtime_ns)
        match entry.kind:
            case "file":
                self._add_file(walk, entry, common)
            case "folder":
                attributes = _attributes(walk.folder())
                self._append(Row("folder", *common, opaque=entry.opaque, attributes=attributes), [], None)
            case "link":
                target = latin(os.readlink(name, dir_fd=walk.folder()))
                self._append(Row("link", *common, target=target), [], None)
            case "whiteout":
                self._append(Row("whiteout", *common), [], None)
            case "other":
                self._add_other(found, common)
        if len(self._run.rows) >= _ROWS and (
            zlib.crc32(os.fsencode(path)) % 64 == 0 or len(self._run.rows) > 4 * _ROWS
        ):
            self._end_run()

    def _add_other(self, found: os.stat_result, common: tuple[int, str, int, int]) -> None:
        code: Any = _CODES.get(stat.S_IFMT(found.st_mode))
        if code is None:
            self._left_out += 1
        else:
            self._append(Row(code, *common), [], None)

    def _add_file(self, walk: Walk, entry: Entry, common: tuple[int, str, int, int]) -> None:
        found = entry.stat
        if found.st_nlink > 1:
            identity = (found.st_dev, found.st_ino)
            first = self._first.setdefault(identity, self._count)
            if first != self._count:
                self._named_again.add(first)
                self._append(Row("name", *common, back=self._count - first), [], None)
                return
        attributes, parts = self._recalled(found) or self._read(walk, entry)
        size = sum(length for _, _, length in parts)
        self._files += 1
        self._size += size
        self._watch.count(files=1, size_bytes=size)
        self._append(Row("file", *common, size=size, attributes=attributes), parts, found)

    def _recalled(self, found: os.stat_result) -> tuple[dict[str, str], list[Part]] | None:
        memory = self._remembered.recall(found)
        if memory is None:
            return None
        attributes, extents = memory
        if not all(chunk is None or self._chunks.has(chunk) for chunk, _, _ in extents):
            return None
        return attributes, list(extents)

    def _read(self, walk: Walk, entry: Entry) -> tuple[dict[str, str], list[Part]]:
        found = entry.stat
        fd = walk.open(entry)
        try:
            attributes = _attributes(fd)
            if found.st_size == 0:
                return attributes, []
            if found.st_size < _SMALL:
                return attributes, self._grouped_part(os.read(fd, found.st_size), entry.path)
            return attributes, self._large(fd, found)
        finally:
            os.close(fd)

    def _grouped_part(self, data: bytes, path: str) -> list[Part]:
        part = (self._piece, self._grouped, len(data))
        self._group.append(data)
        self._grouped += len(data)
        if self._grouped >= _GROUP and (zlib.crc32(os.fsencode(path)) % 8 == 0 or self._grouped > CHUNK - _SMALL):
            self._end_group()
        return [part]

    def _end_group(self) -> None:
        if self._group:
            self._send(b"".join(self._group), self._piece)
            self._group, self._grouped, self._piece = [], 0, Piece()

    def _large(self, fd: int, found: os.stat_result) -> list[Part]:
        parts: list[Part] = []
        place = 0
        for start, end in [*_filled(fd, found), (found.st_size, found.st_size)]:
            if start > place:
                parts.append((None, 0, start - place))
            place = start
            while place < end:
                data = os.pread(fd, min(CHUNK, end - place), place)
                if not data:
                    return parts  # it has been cut while it was read
                piece = Piece()
                self._send(data, piece)
                parts.append((piece, 0, len(data)))
                place += len(data)
        return parts

    def _send(self, data: bytes, piece: Piece) -> None:
        """Hand content to the other threads, waiting while they have enough."""
        self._renew()
        self._room.acquire()
        if self._failure is not None:
            self._room.release()
            raise self._failure
        piece.future = self._pool.submit(self._store, data)

    def _store(self, data: bytes) -> str:
        try:
            self._watch.check()
            chunk, written = self._chunks.keep(data)
            self._watch.count(moved_bytes=written)
        except BaseException as failure:
            self._failure = self._failure or failure
            raise
        else:
            return chunk
        finally:
            self._room.release()

    def _append(self, row: Row, parts: list[Part], found: os.stat_result | None) -> None:
        self._run.rows.append(row)
        self._run.parts.append(parts)
        self._run.stats.append(found)
        self._count += 1

    def _end_run(self) -> None:
        self._end_group()
        self._runs.append(self._run)
        self._run = _Run()
        # The last one is still on its way; the one before it has most likely arrived.
        while len(self._runs) > 1:
            self._write_run(self._runs.pop(0))

    def _write_run(self, run: _Run) -> None:
        local: dict[str, int] = {}
        rows = [
            row._replace(extents=self._resolved(parts, found, row, local)) if parts else row
            for row, parts, found in zip(run.rows, run.parts, run.stats, strict=True)
        ]
        self._needed.update(dict.fromkeys(local))
        piece = Piece()
        self._send(encode_rows(list(local), rows), piece)
        self._segments.append(piece)

    def _resolved(self, parts: list[Part], found: os.stat_result | None, row: Row, local: dict[str, int]) -> list[int]:
        extents: list[Extent] = []
        numbers: list[int] = []
        for source, offset, length in parts:
            chunk = source.name() if isinstance(source, Piece) else source
            extents.append((chunk, offset, length))
            numbers += (-1 if chunk is None else local.setdefault(chunk, len(local)), offset, length)
        if found is not None:
            self._remembered.note(found, (row.attributes, extents))
        return numbers

    def _finish(self) -> Tree:
        while self._runs:
            self._write_run(self._runs.pop(0))
        return Tree(
            rows=[piece.name() for piece in self._segments],
            chunks=list(self._needed),
            named_again=sorted(self._named_again),
            files=self._files,
            size_bytes=self._size,
            left_out=self._left_out,
        )


def _filled(fd: int, found: os.stat_result) -> list[tuple[int, int]]:
    """Return where a file has content, from and to; all of it unless it takes less room than its size."""
    if found.st_blocks * 512 >= found.st_size or found.st_size < _SPARSE:
        return [(0, found.st_size)]
    filled, place = [], 0
    while place < found.st_size:
        try:
            start = os.lseek(fd, place, os.SEEK_DATA)
        except OSError:
            break  # a hole to the end
        place = min(os.lseek(fd, start, os.SEEK_HOLE), found.st_size)
        filled.append((start, place))
    return filled


def _attributes(place: int | str) -> dict[str, str]:
    """Return the attributes that a user has given, not those that the overlay keeps for itself."""
    return {
        latin(name): os.getxattr(place, name).decode("latin-1")
        for name in os.listxattr(place)
        if name.startswith("user.") and (not name.startswith(_OWN) or name.startswith(_ESCAPED))
    }


@contextlib.contextmanager
def _explained(layers: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        for layer in layers:
            if not os.path.isdir(layer):  # noqa: PTH112
                raise WorkspaceDamaged(f"the layer {layer} is missing", hint="check the workspace's health") from error
        if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
            raise WorkspaceBusy(
                "files were moved while they were archived", hint="archive when nothing runs"
            ) from error
        raise WorkspaceDamaged(f"{error.filename!r} cannot be read: {reason}", hint="check the workspace") from error
