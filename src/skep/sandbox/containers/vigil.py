"""Hear of an engine's end: then its containers cannot be relied on, whether or not they still run.

A container's own death is heard sooner, on its agent's socket.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from skep.sandbox.containers.engine import Engine

Told = Callable[[], None]


class Vigil:
    """A thread on an engine's stream of events, which ends with the engine. It lasts while somebody listens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._listeners: dict[str, Told] = {}
        self._stream: Any = None

    def attend(self, name: str, told: Told) -> None:
        """Have somebody told, in another thread, when the engine has gone. Blocks until that is sure."""
        with self._lock:
            if self._stream is None:
                self._stream = self._engine.ask_now(lambda api: api.events(filters={"type": "daemon"}))
                threading.Thread(target=self._keep, args=(self._stream,), name="skep-vigil", daemon=True).start()
            self._listeners[name] = told

    def leave(self, name: str) -> None:
        """Have somebody told no more. Without anybody to tell, the stream is closed."""
        with self._lock:
            self._listeners.pop(name, None)
            if not self._listeners and self._stream is not None:
                stream, self._stream = self._stream, None
                with contextlib.suppress(OSError):
                    stream.close()

    def _keep(self, stream: Any) -> None:
        for _ in stream:
            pass
        stream._response.close()  # or the SDK leaves its socket to the garbage collector
        with self._lock:
            if self._stream is not stream:
                return  # it was closed here
            self._stream = None
            listeners = list(self._listeners.values())
            self._listeners.clear()
        for told in listeners:
            told()


@cache
def vigil(engine: Engine) -> Vigil:
    """Return the one vigil of an engine in this process."""
    return Vigil(engine)
