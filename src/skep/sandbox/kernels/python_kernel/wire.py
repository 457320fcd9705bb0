"""Messages to and from the controller: four bytes of length, then JSON."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

#: What the controller accepts as one message.
MOST_BYTES = 48 << 20


class Interrupts:
    """Decide when Ctrl-C may break in: while a cell runs, but not in the middle of a message."""

    def __init__(self) -> None:
        self._held = 1
        self._missed = False

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._arrived)

    def forget(self) -> None:
        """Drop what came so far: it was meant for a cell that is over."""
        self._missed = False

    def allow(self) -> None:
        self._held = 0
        if self._missed:
            self._missed = False
            raise KeyboardInterrupt

    def forbid(self) -> None:
        self._held = 1

    def __enter__(self) -> None:
        self._held += 1

    def __exit__(self, *_: object) -> None:
        self._held -= 1
        if self._missed and not self._held:
            self._missed = False
            raise KeyboardInterrupt

    def _arrived(self, *_: object) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self._missed = True


class Channel:
    """The kernel's end of the socket. A forked child has none: what it sends goes nowhere, and its input ends."""

    def __init__(self, fd: int, interrupts: Interrupts) -> None:
        self._fd = fd
        self._interrupts = interrupts
        self._turn = threading.Lock()
        os.register_at_fork(after_in_child=self._close)

    @classmethod
    def take_stdin(cls, interrupts: Interrupts) -> Channel:
        """Move standard input out of the way of the cells' programs, which get an empty one."""
        fd = os.dup(0)
        os.set_inheritable(fd, False)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0, inheritable=True)
        os.close(empty)
        return cls(fd, interrupts)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message whole, even when an interrupt comes meanwhile."""
        # Half a pair of UTF-16, as in names of files that are not UTF-8, has no place in a message.
        data = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
        view = memoryview(len(data).to_bytes(4, "big") + data)
        if threading.current_thread() is threading.main_thread():
            with self._interrupts:
                self._write(view)
        else:
            self._write(view)

    def receive(self) -> Any:
        """Return the next message, or None at the end."""
        head = self._read(4)
        self._interrupts.forget()
        body = self._read(int.from_bytes(head, "big")) if head else b""
        return json.loads(body) if body else None

    def _write(self, view: memoryview) -> None:
        with self._turn:
            while view and self._fd >= 0:
                view = view[os.write(self._fd, view) :]

    def _read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count and self._fd >= 0:
            part = os.read(self._fd, min(count, 1 << 20))
            if not part:
                return b""
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1
        self._turn = threading.Lock()
