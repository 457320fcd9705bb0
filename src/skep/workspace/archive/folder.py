"""A store in a folder of this machine, or of a share mounted on it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from skep.errors import NotFound, SkepError, StorageFull, StoreUnavailable
from skep.workspace.archive.objects import Stored

_DRAFTS = "drafts"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FolderStore:
    """Keeps each object as a file: written beside, brought to the disk, then moved to its name."""

    lanes = 4

    def __init__(self, top: Path) -> None:
        self.url = top.as_uri()
        self._top = top
        self._touched: set[Path] = set()

    def put(self, name: str, data: bytes | bytearray) -> None:
        with self._explained(name):
            draft = self._top / _DRAFTS / secrets.token_hex(16)
            try:
                self._write(draft, data)
                self._publish(draft, self._top / name)
            except OSError:
                draft.unlink(missing_ok=True)
                raise

    def get(self, name: str) -> bytes:
        with self._explained(name):
            try:
                return (self._top / name).read_bytes()
            except FileNotFoundError:
                raise NotFound(f"the store has no {name}", hint="list what it has") from None

    def find(self, name: str) -> Stored | None:
        with self._explained(name):
            try:
                found = (self._top / name).stat()
            except FileNotFoundError:
                return None
        return Stored(name, found.st_size, found.st_mtime)

    def list(self, prefix: str) -> Iterator[Stored]:
        with self._explained(prefix):
            for folder, _, files in os.walk(self._top / prefix, onerror=_raise_unless_missing):
                for file in files:
                    name = os.path.relpath(os.path.join(folder, file), self._top)  # noqa: PTH118
                    if (stored := self.find(name)) is not None:
                        yield stored

    def remove(self, name: str) -> None:
        with self._explained(name):
            (self._top / name).unlink(missing_ok=True)

    def settle(self) -> None:
        with self._explained("the folder"):
            while self._touched:
                sync_folder(self._touched.pop())

    def tidy(self, older_than_s: float) -> None:
        with self._explained(_DRAFTS):
            for draft in self.list(f"{_DRAFTS}/"):
                if draft.written_at < time.time() - older_than_s:
                    self.remove(draft.name)

    def _write(self, draft: Path, data: bytes | bytearray) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(draft, flags, 0o600)
        except FileNotFoundError:
            self._make_folder(draft.parent)
            fd = os.open(draft, flags, 0o600)
        with open(fd, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fdatasync(fd)

    def _publish(self, draft: Path, path: Path) -> None:
        try:
            draft.rename(path)
        except FileNotFoundError:
            self._make_folder(path.parent)
            draft.rename(path)
        self._touched.add(path.parent)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder of the store and those above it, for its owner alone."""
        self._top.mkdir(mode=0o700, parents=True, exist_ok=True)
        for above in reversed(folder.relative_to(self._top).parents):
            (self._top / above).mkdir(mode=0o700, exist_ok=True)
            self._touched.add(self._top / above)
        folder.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except SkepError:
            raise
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            if error.errno in _FULL:
                raise StorageFull(
                    f"no room left for {name} in {self._top}", hint="free some room, or remove archives and collect"
                ) from error
            raise StoreUnavailable(
                f"the archives in {self._top} cannot be used: {name}: {reason}",
                hint="see that the folder can be written",
            ) from error


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _raise_unless_missing(error: OSError) -> None:
    if error.errno != errno.ENOENT:
        raise error
