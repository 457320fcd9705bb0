"""Files whose bytes are on their way: one that is read, one that is written."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skep.sandbox.twin.inside.files import Addition, Draft
from skep.sandbox.twin.inside.flow import Source
from skep.sandbox.twin.inside.loop import Loop, Outbox
from skep.sandbox.twin.inside.paths import NotUsable
from skep.sandbox.twin.inside.wire import BOTH, COUNTED, TAKEN

if TYPE_CHECKING:
    from skep.sandbox.twin.inside.luggage import Planted

Answer = Callable[[Any], None]


class Download:
    """A file that is read."""

    def __init__(self, loop: Loop, outbox: Outbox, number: int) -> None:
        self._loop = loop
        self._outbox = outbox
        self._number = number
        self._released = False
        self.sources: dict[int, Source] = {}

    def opened(self, file: tuple[int, int], answer: Answer) -> None:
        fd, size = file
        if self._released:
            os.close(fd)
            return
        answer({"size": size})
        self.sources[BOTH] = Source(self._loop, self._outbox, self._number, BOTH, fd)

    def release(self) -> None:
        self._released = True
        for source in self.sources.values():
            source.close()


class Upload:
    """A file that is written. What comes before it is open waits, within the window."""

    def __init__(self, loop: Loop, outbox: Outbox, number: int, asked: dict[str, Any]) -> None:
        self._loop = loop
        self._outbox = outbox
        self._number = number
        self._mode: int | None = asked.get("mode")
        self._waiting: collections.deque[bytes] = collections.deque()
        self._draft: Draft | Addition | Planted | None = None
        self._busy = True
        self._ending = False
        self._released = False
        self.answer: Answer = lambda _: None

    def opened(self, draft: Draft | Addition | Planted) -> None:
        self._draft = draft
        self._go_on(None)

    def put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._go_on_if_idle()

    def end(self) -> None:
        self._ending = True
        self._go_on_if_idle()

    def release(self) -> None:
        self._released = True
        self._go_on_if_idle()

    def _go_on_if_idle(self) -> None:
        if not self._busy:
            self._go_on(None)

    def _go_on(self, failure: Exception | None) -> None:
        """Do the next thing there is to do, in a thread, one at a time."""
        draft = self._draft
        self._busy = False
        if draft is None:
            return
        if failure is not None or self._released:
            self._draft = None
            self._loop.in_thread(draft.discard, lambda _: None if self._released else self.answer(failure))
        elif self._waiting:
            pieces = list(self._waiting)
            self._waiting.clear()
            self._do(lambda: _write_all(draft.fd, pieces), self._taken)
        elif self._ending:
            self._do(lambda: draft.publish(self._mode), self._published)

    def _do(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self._busy = True
        self._loop.in_thread(lambda: caught(work), lambda done: self._check(done, then))

    def _check(self, done: Any, then: Callable[[Any], None]) -> None:
        if isinstance(done, Exception):
            self._go_on(done)
        else:
            then(done)

    def _taken(self, amount: int) -> None:
        self._outbox.say(TAKEN, self._number, COUNTED.pack(amount))
        self._go_on(None)

    def _published(self, _: None) -> None:
        draft, self._draft = self._draft, None
        assert draft is not None
        self._loop.in_thread(draft.discard, lambda _: self.answer(None))


def caught(work: Callable[[], Any]) -> Any:
    """Return what work returned, or the failure that a file is to blame for."""
    try:
        return work()
    except (OSError, NotUsable) as error:
        return error


def _write_all(fd: int, pieces: Any) -> int:
    taken = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(fd, view) :]
        taken += len(piece)
    return taken
