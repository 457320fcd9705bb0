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
from collections.abc import Iterator, Sequence
from typing import Any

from skep.errors import WorkspaceBusy, WorkspaceDamaged
from skep.workspace.archive.chunks import Chunks
from skep.workspace.archive.conveyor import CHUNK, SMALL, Conveyor, Part
from skep.workspace.archive.index import Row, Tree, latin
from skep.workspace.archive.ledger import Ledger
from skep.workspace.archive.remembered import Remembered
from skep.workspace.archive.watch import Watch
from skep.workspace.layers.overlay import Entry, Walk

_SPARSE = 1 << 16
_OWN = "user.overlay."
#: What the kernel keeps for a user's own attribute of a name that it uses itself.
_ESCAPED = "user.overlay.overlay."
_CODES = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}

_Common = tuple[int, str, int, int]


class Saving:
    """One tree on its way into a store."""

    def __init__(self, chunks: Chunks, conveyor: Conveyor, remembered: Remembered, watch: Watch) -> None:
        self._chunks = chunks
        self._conveyor = conveyor
        self._remembered = remembered
        self._watch = watch
        self._ledger = Ledger(conveyor, remembered)
        self._first: dict[tuple[int, int], int] = {}
        self._named_again: set[int] = set()
        self._files = self._size = self._left_out = 0

    def tree(self, layers: Sequence[str], *, over: Sequence[str] | None) -> Tree:
        """Put everything that a stack shows into the store, and return what is needed to get it back."""
        try:
            with _explained(layers):
                top = os.stat(layers[0])  # noqa: PTH116
                with Walk(layers, over=over) as walk:
                    self._add_top(top, walk.folder())
                    for entry in walk:
                        self._watch.check()
                        self._add(walk, entry)
                        self._ledger.may_end(entry.path)
            return self._finish()
        finally:
            self._conveyor.close()

    def _finish(self) -> Tree:
        rows, chunks = self._ledger.finish()
        return Tree(
            rows=rows,
            chunks=chunks,
            named_again=sorted(self._named_again),
            files=self._files,
            size_bytes=self._size,
            left_out=self._left_out,
        )

    def _add_top(self, found: os.stat_result, top: int) -> None:
        row = Row("folder", 0, "", stat.S_IMODE(found.st_mode), found.st_mtime_ns, attributes=_attributes(top))
        self._ledger.add(row)

    def _add(self, walk: Walk, entry: Entry) -> None:
        found, path = entry.stat, entry.path
        name, depth = path.rpartition("/")[2], path.count("/") + 1
        common = (depth, latin(name), stat.S_IMODE(found.st_mode), found.st_mtime_ns)
        match entry.kind:
            case "file":
                self._add_file(walk, entry, common)
            case "folder":
                self._ledger.add(Row("folder", *common, opaque=entry.opaque, attributes=_attributes(walk.folder())))
            case "link":
                self._ledger.add(Row("link", *common, target=latin(os.readlink(name, dir_fd=walk.folder()))))
            case "whiteout":
                self._ledger.add(Row("whiteout", *common))
            case "other":
                self._add_other(found, common)

    def _add_other(self, found: os.stat_result, common: _Common) -> None:
        code: Any = _CODES.get(stat.S_IFMT(found.st_mode))
        if code is None:
            self._left_out += 1
        else:
            self._ledger.add(Row(code, *common))

    def _add_file(self, walk: Walk, entry: Entry, common: _Common) -> None:
        found = entry.stat
        if found.st_nlink > 1 and self._added_again(found, common):
            return
        attributes, parts = self._recalled(found) or self._read(walk, entry)
        size = sum(length for _, _, length in parts)
        self._files += 1
        self._size += size
        self._watch.count(files=1, size_bytes=size)
        self._ledger.add_file(Row("file", *common, size=size, attributes=attributes), parts, found)

    def _added_again(self, found: os.stat_result, common: _Common) -> bool:
        """Add a further name of a file that has been added; False for the first name of one."""
        here = self._ledger.count
        first = self._first.setdefault((found.st_dev, found.st_ino), here)
        if first == here:
            return False
        self._named_again.add(first)
        self._ledger.add(Row("name", *common, back=here - first))
        return True

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
            if found.st_size < SMALL:
                return attributes, [self._conveyor.group(os.read(fd, found.st_size), entry.path)]
            return attributes, self._cut(fd, found)
        finally:
            os.close(fd)

    def _cut(self, fd: int, found: os.stat_result) -> list[Part]:
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
                parts.append((self._conveyor.send(data), 0, len(data)))
                place += len(data)
        return parts


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
