"""Keep what a running cell gives, within bounds, and pass it on as it comes."""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from skep.sandbox.results import Event, Printed, Result

_RESULTS_BYTES = 64 << 20
_RESULTS = 1000
#: How much a reader of events may lag behind before the cell is held up.
_LAG_BYTES = 1 << 20

OnText = Callable[[str], object]
OnResult = Callable[[Result], object]


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told of each piece as it comes."""

    stdout: OnText | None = None
    stderr: OnText | None = None
    result: OnResult | None = None


class Text:
    """One stream: its beginning is kept, all of it is decoded for whoever listens."""

    def __init__(self, keep: int, listener: OnText | None) -> None:
        self._keep = keep
        self._kept = bytearray()
        self._listener = listener
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.truncated = False

    def add(self, data: bytes) -> None:
        room = self._keep - len(self._kept)
        self._kept += data[:room]
        self.truncated = self.truncated or len(data) > room
        if self._listener is not None and (text := self._decoder.decode(data)):
            self._listener(text)

    def end(self) -> str:
        if self._listener is not None and (text := self._decoder.decode(b"", final=True)):
            self._listener(text)
        return self._kept.decode(errors="replace")


class Capture:
    """A sink that keeps a cell's output and results for `Cell`."""

    def __init__(self, keep: int, listeners: Listeners) -> None:
        self._texts = {"stdout": Text(keep, listeners.stdout), "stderr": Text(keep, listeners.stderr)}
        self._listener = listeners.result
        self._size = 0
        self._dropped = False
        self.results: list[Result] = []

    def printed(self, stream: str, data: bytes) -> None:
        self._texts[stream].add(data)

    def shown(self, result: Result) -> None:
        self._size += result.size
        if self._size > _RESULTS_BYTES or len(self.results) >= _RESULTS:
            self._dropped = True
            return
        self.results.append(result)
        if self._listener is not None:
            self._listener(result)

    async def room(self) -> None:
        """Whoever listens is called at once, so there is always room."""

    @property
    def truncated(self) -> bool:
        return self._dropped or any(text.truncated for text in self._texts.values())

    def end(self) -> tuple[str, str]:
        """Return what was kept of standard output and error."""
        return self._texts["stdout"].end(), self._texts["stderr"].end()


class Feed(Capture):
    """A capture whose pieces are pulled as events; a reader that lags holds the cell up, not memory."""

    def __init__(self, keep: int) -> None:
        super().__init__(
            keep,
            Listeners(
                stdout=lambda text: self._put(Printed("stdout", text), len(text)),
                stderr=lambda text: self._put(Printed("stderr", text), len(text)),
                result=lambda result: self._put(result, result.size),
            ),
        )
        self._events: deque[tuple[Event, int]] = deque()
        self._lag = 0
        self._changed = asyncio.Event()
        self._roomy = asyncio.Event()
        self._roomy.set()
        self._closed = False

    async def room(self) -> None:
        await self._roomy.wait()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def next(self) -> Event | None:
        """Return the next event, or None after the last."""
        while not self._events and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if not self._events:
            return None
        event, size = self._events.popleft()
        self._lag -= size
        if self._lag <= _LAG_BYTES:
            self._roomy.set()
        return event

    def _put(self, event: Event, size: int) -> None:
        self._events.append((event, size))
        self._lag += size
        if self._lag > _LAG_BYTES:
            self._roomy.clear()
        self._changed.set()
