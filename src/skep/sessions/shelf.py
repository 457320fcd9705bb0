"""The artifacts of this machine, each kept once under the hash of its bytes.

    artifacts/<first two digits>/<sha256>    mode 0600

What is there is whole: a file gets its name when all of it is on the disk. Knowing a hash is no right to what it
names; whoever hands artifacts out has to ask whose they are.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from skep.errors import Corrupt, InvalidRequest, NotFound, StorageFull, Unavailable
from skep.sessions.filenames import shown
from skep.sessions.sniff import HEAD_BYTES
from skep.workspace.faults import in_thread

_PIECE = 1 << 20
_HASH = re.compile(r"[0-9a-f]{64}")


class Shelf:
    """A folder of files that are found by their content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @asynccontextmanager
    async def draft(self) -> AsyncIterator[Draft]:
        """Begin a file, which is gone at the end unless it was kept."""
        fd, name = await in_thread(self._begin)
        try:
            yield Draft(self, fd)
        finally:
            os.close(fd)
            if name is not None:
                name.unlink(missing_ok=True)

    async def put(self, data: bytes) -> str:
        """Keep bytes, and return their hash."""
        async with self.draft() as draft:
            await draft.add(data)
            return await draft.keep()

    async def get(self, digest: str) -> AsyncIterator[bytes]:
        """Yield the bytes with that hash; if they turn out to be others, the end is `Corrupt`."""
        fd, seen = await in_thread(self._open, digest), sha256()
        try:
            while piece := await asyncio.to_thread(os.read, fd, _PIECE):
                seen.update(piece)
                yield piece
        finally:
            os.close(fd)
        if seen.hexdigest() != digest:
            raise Corrupt(f"the artifact {digest} is not what was kept", hint="collect it again from its workspace")

    async def size(self, digest: str) -> int:
        def measured() -> int:
            fd = self._open(digest)
            try:
                return os.fstat(fd).st_size
            finally:
                os.close(fd)

        return await in_thread(measured)

    async def remove(self, digest: str) -> None:
        """Remove what has that hash, if it is there."""
        await in_thread(self.place(digest).unlink, missing_ok=True)

    def place(self, digest: str) -> Path:
        """Return where the bytes with that hash are, or would be."""
        if not _HASH.fullmatch(digest):
            raise InvalidRequest(f"{shown(digest)} is not a SHA-256 hash", hint="give its 64 hexadecimal digits")
        return self.folder / digest[:2] / digest

    def _open(self, digest: str) -> int:
        place = self.place(digest)
        with _explained(place):
            try:
                return os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError as error:
                hint = "it may have been removed; collect it again from its workspace"
                raise NotFound(f"there is no artifact {digest}", hint=hint) from error

    def _begin(self) -> tuple[int, Path | None]:
        """Open a file without a name; where the file system has none, return its name too."""
        with _explained(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                return os.open(self.folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600), None
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                    raise
            name = self.folder / f".draft-{secrets.token_hex(8)}"
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), name


@dataclass(slots=True)
class Draft:
    """A file that is being written; its hash is that of what was written."""

    shelf: Shelf
    fd: int
    size: int = 0
    #: The first bytes, for those who want to know what it is.
    head: bytearray = field(default_factory=bytearray)
    _hash: Any = field(default_factory=sha256)

    @property
    def sha256(self) -> str:
        digest: str = self._hash.hexdigest()
        return digest

    async def add(self, piece: bytes) -> None:
        await in_thread(self._write, piece)

    async def keep(self) -> str:
        """Put the file on the shelf, durably, and return its hash."""
        await in_thread(self._publish)
        return self.sha256

    def _write(self, piece: bytes) -> None:
        self._hash.update(piece)
        self.size += len(piece)
        self.head += piece[: HEAD_BYTES - len(self.head)]
        view = memoryview(piece)
        with _explained(self.shelf.folder):
            while view:
                view = view[os.write(self.fd, view) :]

    def _publish(self) -> None:
        place = self.shelf.place(self.sha256)
        with _explained(place):
            os.fsync(self.fd)
            place.parent.mkdir(mode=0o700, exist_ok=True)
            folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._name(folder, place.name)
                os.fsync(folder)
            finally:
                os.close(folder)
            _sync(self.shelf.folder)

    def _name(self, folder: int, name: str) -> None:
        # A link never replaces, so it gets a name of its own first, to take the place even of a damaged file.
        fresh = f".{name}-{secrets.token_hex(8)}"
        # With a folder's descriptor it is linkat(2), which can follow; without one it is link(2), which does not.
        os.link(f"/proc/self/fd/{self.fd}", fresh, dst_dir_fd=folder, follow_symlinks=True)
        try:
            os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(fresh, dir_fd=folder)
            raise


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _explained(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no room is left for {place}", hint="free some space and try again") from error
        raise Unavailable(f"{place}: {error.strerror}", hint="check that the folder is yours to write") from error
