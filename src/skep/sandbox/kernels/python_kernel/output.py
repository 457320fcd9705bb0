"""Standard output and error: in large pieces when a cell prints much, and soon when it prints little."""

from __future__ import annotations

import io
import os
import sys
import threading
import time

_SOON_S = 0.02


class Output(io.TextIOWrapper):
    """A text stream on a pipe that a thread flushes soon after something was written."""

    def __init__(self, fd: int, flusher: Flusher) -> None:
        raw = io.FileIO(fd, "w", closefd=False)
        super().__init__(io.BufferedWriter(raw, 1 << 16), "utf-8", "backslashreplace", newline="\n")
        self._flusher = flusher

    def write(self, text: str) -> int:
        with self._flusher.lock:
            count = super().write(text)
        self._flusher.wake()
        return count

    def flush(self) -> None:
        with self._flusher.lock:
            super().flush()


class Flusher:
    """The two streams and the thread that flushes them: a write per line would cost more than the printing."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._dirty = threading.Event()
        self._streams = (Output(1, self), Output(2, self))
        sys.stdout, sys.stderr = self._streams
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  for as long as the kernel lives
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._in_child)
        self._start()

    def wake(self) -> None:
        if not self._dirty.is_set():
            self._dirty.set()

    def flush(self) -> None:
        """Hand on everything written so far, also through streams that the cell put in the place of ours."""
        for stream in {*self._streams, sys.stdout, sys.stderr}:
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue  # the cell closed it, or replaced it with something that is no stream
        self._dirty.clear()

    def _start(self) -> None:
        threading.Thread(target=self._run, name="skep-flush", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._dirty.wait()
            time.sleep(_SOON_S)
            self.flush()

    def _before_fork(self) -> None:
        # What is in the buffers would otherwise be printed by both.
        self.lock.acquire()
        for stream in self._streams:
            if not stream.closed:
                stream.flush()

    def _after_fork(self) -> None:
        self.lock.release()

    def _in_child(self) -> None:
        self.lock = threading.RLock()
        self._dirty = threading.Event()
        self._start()
