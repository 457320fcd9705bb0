"""Follow work that goes on in threads, and stop it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")
_OFTEN_S = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a save or a restore has come."""

    files: int = 0
    size_bytes: int = 0
    #: What went into the store or came out of it.
    moved_bytes: int = 0


class Watch:
    """Counts what work has done, tells of it now and then, and ends it when nobody waits for it any more."""

    def __init__(self, tell: Callable[[Progress], None] = lambda _: None) -> None:
        self.progress = Progress()
        self._tell = tell
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._told_at = 0.0

    def stop(self) -> None:
        self._stopped.set()

    def check(self) -> None:
        """Raise CancelledError if the work is to end."""
        if self._stopped.is_set():
            raise CancelledError

    def count(self, *, files: int = 0, size_bytes: int = 0, moved_bytes: int = 0) -> None:
        with self._lock:
            now = self.progress
            self.progress = Progress(now.files + files, now.size_bytes + size_bytes, now.moved_bytes + moved_bytes)
            if time.monotonic() - self._told_at < _OFTEN_S:
                return
            self._told_at = time.monotonic()
        self._tell(replace(self.progress))


async def in_thread(work: Callable[[Watch], T], on_progress: Callable[[Progress], None] | None = None) -> T:
    """Do blocking work in a thread. Progress is told in the event loop; on cancellation the work ends first."""
    loop = asyncio.get_running_loop()
    watch = Watch(lambda progress: _pass_on(loop, on_progress, progress)) if on_progress else Watch()
    task = asyncio.ensure_future(asyncio.to_thread(work, watch))
    try:
        result = await asyncio.shield(task)
    except asyncio.CancelledError:
        watch.stop()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at, or the loop complains that nobody has
        raise
    if on_progress is not None:
        on_progress(watch.progress)
    return result


def _pass_on(loop: asyncio.AbstractEventLoop, on_progress: Callable[[Progress], None], progress: Progress) -> None:
    loop.call_soon_threadsafe(on_progress, progress)
