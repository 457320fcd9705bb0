"""The kept output of a background job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

KEPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Output from a cursor on. `missed` bytes before it were dropped because the log is bounded."""

    data: bytes
    cursor: int
    missed: int


class Log:
    """The last bytes of an output, addressed by how many bytes came before them."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept = kept_bytes
        self._tail = bytearray()
        self._total = 0
        self._closed = False
        self._grown = asyncio.Event()

    def append(self, data: bytes) -> None:
        self._tail += data
        self._total += len(data)
        # Cut in large steps: trimming a byte array moves all that is left.
        if len(self._tail) > 2 * self._kept:
            del self._tail[: -self._kept]
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def read(self, cursor: int = 0) -> Excerpt:
        """Return what is kept from a cursor on; `cursor` of the answer is where to go on."""
        first = self._total - len(self._tail)
        cursor = max(cursor, 0)
        start = max(cursor, first)
        return Excerpt(bytes(self._tail[start - first :]), self._total, max(0, start - cursor))

    async def follow(self, cursor: int = 0) -> AsyncIterator[bytes]:
        """Yield what is kept from a cursor on, then what is added, until the log is closed."""
        while True:
            grown = self._grown
            excerpt = self.read(cursor)
            if excerpt.data:
                cursor = excerpt.cursor
                yield excerpt.data
            elif self._closed:
                return
            else:
                await grown.wait()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()
