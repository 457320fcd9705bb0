"""The one loop in which the twin hears, reads and writes; and the few threads for what may take long."""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any

from skep.sandbox.twin.inside.wire import frame

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
#: Nothing more is read to be sent on while this much waits to be taken.
_FULL = 1 << 20
_WORKERS = 4


class Loop:
    """Calls what waits for a descriptor, for a time, or for a thread to be done."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._results: collections.deque[Callable[[], None]] = collections.deque()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._workers = 0
        self._asleep, self.waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.watch(self._asleep, READ, self._awake)
        #: Called once in every turn, after what was ready: such as children to be reaped.
        self.each_turn: list[Callable[[], bool]] = []

    def watch(self, fd: int, events: int, call: Callable[[], None]) -> None:
        self._selector.register(fd, events, call)

    def unwatch(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), call))

    def in_thread(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Do work elsewhere and call `then` here with what it returned."""

        def done() -> None:
            result = work()
            self._results.append(lambda: then(result))
            self.wake()

        if self._workers < _WORKERS:
            self._workers += 1
            threading.Thread(target=self._serve, daemon=True).start()
        self._work.put(done)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self.waker, b"\0")

    def turn(self) -> None:
        """Wait for something to do, and do it."""
        ready = self._selector.select(self._patience())
        for key, _ in ready:
            # What came before in this turn may have ended what waits here.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
        while self._results:
            self._results.popleft()()
        again = [call() for call in self.each_turn]
        if any(again):
            self.wake()

    def _patience(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._asleep, 4096)

    def _serve(self) -> None:
        while True:
            self._work.get()()


class Outbox:
    """What the twin says, in order, to a descriptor that may be slow."""

    def __init__(self, loop: Loop, fd: int, encode: Callable[[bytes], bytes]) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._encode = encode
        self._waiting = bytearray()
        self._watched = False
        #: Called when there is room again.
        self.relieved: list[Callable[[], None]] = []

    @property
    def full(self) -> bool:
        return len(self._waiting) >= _FULL

    def say(self, kind: int, number: int, payload: bytes = b"") -> None:
        self._waiting += self._encode(frame(kind, number, payload))

    def flush(self) -> bool:
        """Write what can be written; at the end of each turn, so that what was said in one turn goes at once."""
        was_full = self.full
        with contextlib.suppress(BlockingIOError):
            while self._waiting:
                with memoryview(self._waiting)[: 1 << 18] as piece:
                    written = os.write(self._fd, piece)
                del self._waiting[:written]
        self._watch(bool(self._waiting))
        if was_full and not self.full:
            for call in self.relieved:
                call()
            return True
        return False

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watched:
            self._loop.watch(self._fd, WRITE, lambda: None)
        elif self._watched and not wanted:
            self._loop.unwatch(self._fd)
        self._watched = wanted
