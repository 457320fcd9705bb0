"""Write a tree from its rows, into a folder that is new.

One descriptor stands in the folder that is being filled, so a tree may be of any depth, and every name is made in that
folder and nowhere else: a row that names something by a path, or twice, is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from skep.errors import ArchiveDamaged
from skep.workspace.archive.index import Row, unlatin
from skep.workspace.layers.overlay import cover, pierce

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Without the bits that lend a file's owner or group to whoever runs it: the owner may be root here.
_MODE = 0o1777
_NODES = {"pipe": stat.S_IFIFO, "socket": stat.S_IFSOCK}


class Planting:
    """A tree that is being written."""

    def __init__(self, top: int, links: int, named_again: Iterable[int], *, owner: tuple[int, int] | None) -> None:
        """Write into the open folder `top`; in `links` are kept the files whose rows will be named again."""
        self._here = os.open(".", _FOLDER, dir_fd=top)
        self._links = links
        self._owner = owner
        self._open: list[Row] = []
        self._count = 0
        self._kept = dict.fromkeys(named_again, False)

    def close(self) -> None:
        os.close(self._here)

    def add(self, row: Row, content: Iterable[memoryview | int]) -> None:
        """Write what a row describes; a file's content comes in pieces, numbers are the lengths of holes."""
        name = self._place(row)
        match row.code:
            case "folder":
                self._add_folder(row, name)
            case "file":
                self._add_file(row, name, content)
            case "link":
                os.symlink(self._plain(row.target), name, dir_fd=self._here)
                self._dress(row, name)
            case "name":
                self._add_name(row, name)
            case "whiteout":
                pierce(self._here, name)
                self._give(name)
            case "pipe" | "socket":
                os.mknod(name, _NODES[row.code] | 0o600, dir_fd=self._here)
                os.chmod(name, row.mode & _MODE, dir_fd=self._here)
                self._dress(row, name)
        self._count += 1

    def finish(self) -> None:
        """Give the folders that are still open their modes and times."""
        while self._open:
            self._leave()

    def _place(self, row: Row) -> str:
        """Go to the folder that a row belongs to and return its name there."""
        if not self._count:
            if row.depth or row.name or row.code != "folder":
                raise ArchiveDamaged("the first row is not the uppermost folder", hint="restore an older version")
            return "."
        if not 1 <= row.depth <= len(self._open):
            raise ArchiveDamaged(f"row {self._count} is in no folder", hint="restore an older version")
        while row.depth < len(self._open):
            self._leave()
        name = self._plain(row.name)
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ArchiveDamaged(f"row {self._count} has the name {name!r}", hint="restore an older version")
        return name

    def _plain(self, text: str) -> str:
        try:
            return unlatin(text)
        except UnicodeEncodeError:
            raise ArchiveDamaged(f"row {self._count} has no name of bytes", hint="restore an older version") from None

    def _add_folder(self, row: Row, name: str) -> None:
        if name != ".":
            os.mkdir(name, 0o700, dir_fd=self._here)
            below = os.open(name, _FOLDER, dir_fd=self._here)
            os.close(self._here)
            self._here = below
        self._open.append(row)
        if row.opaque:
            cover(self._here)

    def _leave(self) -> None:
        """Finish the folder that is open, and go to the one above it."""
        row = self._open.pop()
        folder = self._here
        if self._open:
            self._here = os.open("..", _FOLDER, dir_fd=folder)
        self._finish_open(folder, row)
        if self._open:
            os.close(folder)

    def _add_file(self, row: Row, name: str, content: Iterable[memoryview | int]) -> None:
        fd = os.open(name, _NEW, 0o600, dir_fd=self._here)
        try:
            place = 0
            for piece in content:
                place += piece if isinstance(piece, int) else _write(fd, piece, place)
            if place != row.size:
                raise ArchiveDamaged(f"row {self._count} lacks content", hint="restore an older version")
            if os.fstat(fd).st_size != place:
                os.ftruncate(fd, place)
            self._finish_open(fd, row)
        finally:
            os.close(fd)
        if self._count in self._kept:
            self._kept[self._count] = True
            os.link(name, str(self._count), src_dir_fd=self._here, dst_dir_fd=self._links, follow_symlinks=False)

    def _add_name(self, row: Row, name: str) -> None:
        first = self._count - row.back
        if not self._kept.get(first):
            raise ArchiveDamaged(f"row {self._count} is a name of nothing", hint="restore an older version")
        os.link(str(first), name, src_dir_fd=self._links, dst_dir_fd=self._here, follow_symlinks=False)

    def _finish_open(self, fd: int, row: Row) -> None:
        for name, value in row.attributes.items():
            self._set_attribute(fd, self._plain(name), value)
        if self._owner is not None:
            os.fchown(fd, *self._owner)
        os.fchmod(fd, row.mode & _MODE)
        os.utime(fd, ns=(row.mtime_ns, row.mtime_ns))

    def _set_attribute(self, fd: int, name: str, value: str) -> None:
        if not name.startswith("user.") or "\0" in name:
            raise ArchiveDamaged(f"row {self._count} has the attribute {name!r}", hint="restore an older version")
        os.setxattr(fd, name, value.encode("latin-1"))

    def _give(self, name: str) -> None:
        if self._owner is not None:
            os.chown(name, *self._owner, dir_fd=self._here, follow_symlinks=False)

    def _dress(self, row: Row, name: str) -> None:
        self._give(name)
        os.utime(name, ns=(row.mtime_ns, row.mtime_ns), dir_fd=self._here, follow_symlinks=False)


def _write(fd: int, piece: memoryview, place: int) -> int:
    total = len(piece)
    while piece:
        written = os.pwrite(fd, piece, place)
        piece, place = piece[written:], place + written
    return total
