"""What is done to files, in a thread: each takes what was asked and returns what is answered."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from skep.sandbox.twin.inside.paths import NotUsable, Root
from skep.sandbox.twin.inside.wire import name_in, name_out

if TYPE_CHECKING:
    from skep.sandbox.twin.inside.luggage import Planted

_FOLDER = os.O_PATH | os.O_DIRECTORY
_LIST_LIMIT = 100_000


class Files:
    """The acts that come and go with one question. Reading and writing have bytes on their way: see `transfer`."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.acts: dict[str, Callable[[dict[str, Any]], Any]] = {
            "stat": self._stat,
            "list": self._list,
            "move": self._move,
            "remove": self._remove,
            "mkdir": self._mkdir,
        }

    def open_to_read(self, asked: dict[str, Any]) -> tuple[int, int]:
        """Return the file and its size."""
        fd = self.root.open_regular(name_in(asked["path"]), os.O_RDONLY)
        size = os.fstat(fd).st_size
        limit = asked.get("limit")
        if limit is not None and size > limit:
            os.close(fd)
            raise NotUsable("large", size)
        return fd, size

    def open_to_pack(self, asked: dict[str, Any]) -> tuple[int, int]:
        """Return where a folder can be read as one stream, and no size: nobody knows it before."""
        from skep.sandbox.twin.inside.luggage import packed  # seldom needed, and the start should be quick

        return packed(self.root.open(self.root.inside(name_in(asked["path"])), _FOLDER), asked["known"]), 0

    def planting(self, asked: dict[str, Any]) -> Planted:
        """Open a folder to be made what a stream says, instead of what it is."""
        from skep.sandbox.twin.inside.luggage import Planted

        return Planted(self._make_folders(self.root.inside(name_in(asked["path"]))))

    def addition(self, asked: dict[str, Any]) -> Addition | Draft:
        """Open a file to add to its end; one that is not there is drafted."""
        try:
            return Addition(self.root.open_regular(name_in(asked["path"]), os.O_WRONLY | os.O_APPEND, sole=True))
        except FileNotFoundError:
            return self.draft(asked)

    def draft(self, asked: dict[str, Any]) -> Draft:
        folder, name = posixpath.split(self.root.inside(name_in(asked["path"])))
        if name in (b"", b"."):
            raise NotUsable("folder")
        parent = self._make_folders(folder)
        try:
            return Draft.begin(parent, name)
        except BaseException:
            os.close(parent)
            raise

    def _stat(self, asked: dict[str, Any]) -> list[Any]:
        folder, name = posixpath.split(self.root.inside(name_in(asked["path"])))
        with closing(self.root.open(folder, _FOLDER)) as parent:
            return _describe(parent, name or b".")

    def _list(self, asked: dict[str, Any]) -> list[list[Any]]:
        entries: list[list[Any]] = []
        folder_flags = os.O_RDONLY | os.O_DIRECTORY
        with closing(self.root.open(self.root.inside(name_in(asked["path"])), folder_flags)) as folder:
            for entry in os.scandir(folder):
                if len(entries) >= _LIST_LIMIT:
                    raise NotUsable("many", _LIST_LIMIT)
                with contextlib.suppress(FileNotFoundError):
                    entries.append(_describe(folder, os.fsencode(entry.name)))
        return entries

    def _move(self, asked: dict[str, Any]) -> None:
        from_folder, from_name = posixpath.split(self.root.inside(name_in(asked["path"])))
        to_folder, to_name = posixpath.split(self.root.inside(name_in(asked["target"])))
        with closing(self.root.open(from_folder, _FOLDER)) as from_fd, closing(self._make_folders(to_folder)) as to_fd:
            os.rename(from_name, to_name, src_dir_fd=from_fd, dst_dir_fd=to_fd)

    def _remove(self, asked: dict[str, Any]) -> None:
        folder, name = posixpath.split(self.root.inside(name_in(asked["path"])))
        with closing(self.root.open(folder, _FOLDER)) as parent:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=parent)
            elif asked.get("recursive"):
                from skep.sandbox.erase import erase_at  # seldom needed, and the start should be quick

                erase_at(parent, os.fsdecode(name))
            else:
                os.rmdir(name, dir_fd=parent)

    def _mkdir(self, asked: dict[str, Any]) -> None:
        os.close(self._make_folders(self.root.inside(name_in(asked["path"]))))

    def _make_folders(self, inside: bytes) -> int:
        """Open a folder for `*at` calls, making what is missing of the way to it."""
        with contextlib.suppress(FileNotFoundError):
            return self.root.open(inside, _FOLDER)
        parts = inside.split(b"/")
        for depth, name in enumerate(parts, 1):
            above = self.root.open(b"/".join(parts[: depth - 1]), _FOLDER)
            with closing(above), contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=above)
        return self.root.open(inside, _FOLDER)


class Draft:
    """A file that is being written beside the one it will replace; without a name, where the file system can."""

    def __init__(self, parent: int, name: bytes, hidden: bytes, fd: int, *, named: bool) -> None:
        self.parent = parent
        self.name = name
        self.hidden = hidden
        self.fd = fd
        self._named = named

    @classmethod
    def begin(cls, parent: int, name: bytes) -> Draft:
        hidden = b".skep-" + os.urandom(8).hex().encode()
        flags = os.O_WRONLY | os.O_CLOEXEC
        try:
            return cls(parent, name, hidden, os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=parent), named=False)
        except OSError as error:
            # Kernels that know nothing of it see a folder that is to be written.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return cls(parent, name, hidden, os.open(hidden, flags, 0o600, dir_fd=parent), named=True)

    def publish(self, mode: int | None) -> None:
        """Put the draft in the place of what is there."""
        os.fchmod(self.fd, _mode_at(self.parent, self.name) if mode is None else mode & 0o777)
        if not self._named:
            # A link cannot replace a file, so the draft gets a name of its own first.
            os.link(f"/proc/self/fd/{self.fd}", self.hidden, dst_dir_fd=self.parent, follow_symlinks=True)
        os.rename(self.hidden, self.name, src_dir_fd=self.parent, dst_dir_fd=self.parent)

    def discard(self) -> None:
        """Remove the draft unless it has been published, and close it."""
        with contextlib.suppress(OSError):
            os.unlink(self.hidden, dir_fd=self.parent)
        os.close(self.fd)
        os.close(self.parent)


class Addition:
    """A file that is being added to."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def publish(self, mode: int | None) -> None:
        """Leave it as it is: what was added is there."""

    def discard(self) -> None:
        os.close(self.fd)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _mode_at(parent: int, name: bytes) -> int:
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return 0o644
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return stat.S_IMODE(found.st_mode) & 0o777 if stat.S_ISREG(found.st_mode) else 0o644


def _describe(parent: int, name: bytes) -> list[Any]:
    """Return what is at a name: name, kind, size, mode, when it was changed, where it points."""
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    kind = _kind(found.st_mode)
    target = name_out(os.readlink(name, dir_fd=parent)) if kind == "link" else None
    return [name_out(name), kind, found.st_size, stat.S_IMODE(found.st_mode), found.st_mtime, target]


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "other"
