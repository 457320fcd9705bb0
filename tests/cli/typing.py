"""A command at a terminal, with a person who reads and types."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.gateway.served import DEADLINE_S, Home, environment

CTRL_C = b"\x03"


@dataclass(slots=True)
class Terminal:
    """A terminal of its own, at which the process is in the foreground: what is typed as Ctrl-C is a signal to it."""

    process: subprocess.Popen[bytes]
    side: int
    shown: str = ""

    def type(self, keys: bytes) -> None:
        os.write(self.side, keys)

    def shows(self, text: str) -> None:
        """Wait until a text has been on the terminal."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            left = deadline - time.monotonic()
            assert left > 0, f"not in time: {text!r}; on the terminal is: {self.shown}"
            if select.select([self.side], [], [], left)[0]:
                self.shown += os.read(self.side, 65536).decode(errors="replace")


@contextmanager
def at_terminal(home: Home, *words: str) -> Iterator[Terminal]:
    """Run a command of a home at a terminal; it does not outlive the block."""
    near, far = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", _FOREGROUND, *words],
        env={**environment(home.folder), "TERM": "dumb"},
        stdin=far,
        stdout=far,
        stderr=far,
        start_new_session=True,
    ) as process:
        os.close(far)
        try:
            yield Terminal(process, near)
        finally:
            process.kill()
            os.close(near)


#: Makes the terminal the one that controls the process, as it is for whatever a person runs.
_FOREGROUND = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "skep", *sys.argv[1:]])
"""
