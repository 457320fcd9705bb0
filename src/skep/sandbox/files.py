"""The files of a sandbox, as the contract names them."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["file", "folder", "link", "other"]
#: The largest file that `read` returns in one piece; larger ones are streamed with `stream`.
READ_LIMIT_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """What is at a path. Links are described, not followed."""

    name: str
    kind: Kind
    size: int
    mode: int
    modified_at: float
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened below a watched folder; the path is relative to it."""

    kind: Literal["created", "modified", "removed", "overflow"]
    path: str


class Files(Protocol):
    """Read and change files by the paths that a command inside would use; relative ones are below /workspace."""

    async def read(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        """Return a file's bytes; one larger than the limit is `LimitReached`."""
        ...

    def stream(self, path: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes in pieces, whatever its size."""
        ...

    async def write(self, path: str, data: bytes | str | AsyncIterable[bytes], *, mode: int | None = None) -> None:
        """Replace a file in one step: readers see the old or the new bytes. Missing folders are made.

        What is at the path is replaced and never written through: a link there becomes a file.
        """
        ...

    async def append(self, path: str, data: bytes | str) -> None:
        """Add to the end of a file, which is made if it is not there."""
        ...

    async def list(self, path: str = ".") -> list[Entry]:
        """List a folder by name."""
        ...

    async def stat(self, path: str) -> Entry:
        """Describe what is at a path."""
        ...

    async def move(self, source: str, target: str) -> None:
        """Rename within the sandbox, replacing a file at the target."""
        ...

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or an empty folder; with `recursive` all that is in it."""
        ...

    async def mkdir(self, path: str) -> None:
        """Make a folder and those above it; one that is there is left as it is."""
        ...

    def watch(self, path: str = ".") -> AsyncIterator[Change]:
        """Yield what changes below a folder from the first step of the iteration on."""
        ...
