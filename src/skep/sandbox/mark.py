"""Tell whose a process is: by the key in the environment that it began with, which all that it starts inherits.

It is part of the twin too, and so runs in Python 3.9.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

#: The variable that every command, cell and skill of a run has: the run's name, `.` or `:`, and more.
KEY = "SKEP_IDEMPOTENCY_KEY"
_PIECE = 1 << 17
#: How often in a row nobody has to be found: who is just becoming another program has no environment for a moment.
_CLEAN_LOOKS = 2
_AGAIN_S = 0.01


def is_marked(environ: str, run: str, *, dir_fd: int | None = None) -> bool:
    """Say whether a process, given its file `environ` below /proc, is a run's; one that cannot be read is nobody's."""
    try:
        fd = os.open(environ, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError:
        return False
    try:
        variables = b"\0" + b"".join(iter(lambda: os.read(fd, _PIECE), b""))
    except OSError:
        return False
    finally:
        os.close(fd)
    # With what separates it: the name of one run may be how another's begins.
    return any(b"\0%b=%b%b" % (KEY.encode(), os.fsencode(run), end) in variables for end in (b".", b":"))


def until_none(end_found: Callable[[], bool], *, within_s: float) -> bool:
    """Repeat what ends those who are found and says whether there were any; say whether none is left."""
    deadline = time.monotonic() + within_s
    clean = 0
    while clean < _CLEAN_LOOKS and time.monotonic() < deadline:
        if clean:
            time.sleep(_AGAIN_S)
        clean = 0 if end_found() else clean + 1
    return clean >= _CLEAN_LOOKS
