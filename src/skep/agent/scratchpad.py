"""The one part of a hive's MEMORY.md that its workers write: what lies between two marks.

It is written on the host, since a sandbox shows the hive's folder for reading alone. The marks and all that is outside
of them stay as they are, whatever is written between them.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from skep.errors import Denied, LimitReached, Unavailable

OPEN = "<!-- scratchpad -->"
CLOSE = "<!-- /scratchpad -->"
MEMORY = "MEMORY.md"
#: The most that a scratchpad holds, and the most of a memory that is read.
MOST_BYTES = 16 << 10
_FILE_BYTES = 4 << 20
#: Whatever a reader might take for one of the marks.
_MARK = re.compile(r"<!--\s*/?\s*scratchpad\s*/?\s*-->", re.IGNORECASE)


def checked(old: str, new: str) -> str:
    """Return the new text of a memory if it differs from the old in its scratchpad alone; raise Denied otherwise."""
    parts = _split(new)
    if parts is None:
        raise Denied(
            "the scratchpad has to stay one block, between its two marks",
            hint=f"keep {OPEN} and {CLOSE} as they are, and do not write them anywhere else",
        )
    before, inside, after = parts
    if not _same_around(old, before, after):
        raise Denied(
            "only the scratchpad of MEMORY.md can be written",
            hint=f"change nothing outside of {OPEN} and {CLOSE}",
        )
    if len(inside.encode()) > MOST_BYTES:
        raise LimitReached(f"a scratchpad holds at most {MOST_BYTES:,} bytes", hint="keep what matters")
    if "\0" in inside:
        raise Denied("a scratchpad cannot hold a NUL character", hint="leave it out")
    return new


def rewrite(folder: Path, change: Callable[[str], str]) -> int:
    """Change the memory in a folder in one step, within its scratchpad; return its new size in bytes.

    Changes at the same time wait for each other.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            old, about = _read(fd)
            data = checked(old, change(old)).encode()
            _replace(fd, data, about)
        finally:
            os.close(fd)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Unavailable(f"{MEMORY} cannot be written: {reason}", hint="go on without it") from error
    return len(data)


def _split(text: str) -> tuple[str, str, str] | None:
    marks = list(_MARK.finditer(text))
    if [mark[0] for mark in marks] != [OPEN, CLOSE]:
        return None
    first, last = marks
    return text[: first.end()], text[first.end() : last.start()], text[last.start() :]


def _same_around(old: str, before: str, after: str) -> bool:
    if (parts := _split(old)) is not None:
        return (parts[0], parts[2]) == (before, after)
    if _MARK.search(old):
        return False
    # There is no block yet: one may be put at the end.
    return before.removesuffix(OPEN).rstrip() == old.rstrip() and not after.removeprefix(CLOSE).strip()


def _read(folder: int) -> tuple[str, os.stat_result]:
    fd = os.open(MEMORY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _FILE_BYTES:
            raise Unavailable(f"{MEMORY} is not a file that could be read", hint="go on without it")
        return file.read().decode(), about


def _replace(folder: int, data: bytes, about: os.stat_result) -> None:
    draft = f".{MEMORY}.{secrets.token_hex(4)}.part"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, stat.S_IMODE(about.st_mode))
            if os.geteuid() == 0:
                os.fchown(fd, about.st_uid, about.st_gid)
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(draft, MEMORY, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
        raise
