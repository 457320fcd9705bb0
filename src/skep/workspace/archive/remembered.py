"""What is known of files from the last save, so that those that have not changed are not read again.

A file is known by its inode, its size, and when it and its content were last changed. Nobody but root can set the
latter, so a file that agrees in all of them holds what it held. It is a cache: without it a save reads everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from pathlib import Path

import zstandard
from pydantic import TypeAdapter, ValidationError

Identity = tuple[int, int, int, int, int]
#: Chunk, or None for a hole; offset in it; length.
Extent = tuple[str | None, int, int]
Memory = tuple[dict[str, str], list[Extent]]

_RECORDS = TypeAdapter(list[tuple[Identity, Memory]])
#: Two changes within one tick of the file system's clock look alike, so what has just changed is not trusted.
_SETTLED_NS = 2_000_000_000


class Remembered:
    """The files of one workspace in one store, as the last save saw them."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._before = dict(_load(path)) if path is not None else {}
        self._now: dict[Identity, Memory] = {}
        self._until = time.time_ns() - _SETTLED_NS

    def recall(self, found: os.stat_result) -> Memory | None:
        """Return attributes and extents of a file that is as it was."""
        return self._before.get(_identity(found)) if self._before else None

    def note(self, found: os.stat_result, memory: Memory) -> None:
        if self._path is not None and found.st_ctime_ns < self._until:
            self._now[_identity(found)] = memory

    def keep(self) -> None:
        """Write down what was noted, in the place of what was known before."""
        if self._path is None:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        packed = zstandard.compress(json.dumps(list(self._now.items())).encode())
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(packed)
            draft.rename(self._path)
        except OSError:
            # The archive is saved all the same; the next one reads everything.
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


def _load(path: Path) -> list[tuple[Identity, Memory]]:
    try:
        return _RECORDS.validate_json(zstandard.decompress(path.read_bytes()))
    except (OSError, ValidationError, zstandard.ZstdError):
        return []


def _identity(found: os.stat_result) -> Identity:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
