"""Outputs are bounded: the beginning and the end are kept, and the whole is a file that the worker can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skep.errors import SkepError

if TYPE_CHECKING:
    from skep.sessions.computer import Computer

#: How much of an output is kept at each of its ends.
END_CHARS = 8 << 10
FOLDER = "/workspace/.skep/output"


@dataclass(frozen=True, slots=True)
class Kept:
    """What is shown of two streams, and where the whole is."""

    stdout: str
    stderr: str
    truncated: bool
    spooled_to: str | None


def clip(text: str, most: int = 2 * END_CHARS) -> str:
    """Return a text, or its two ends with a line between them that says how much is missing."""
    if len(text) <= most:
        return text
    end = most // 2
    return f"{text[:end]}\n[… {len(text) - 2 * end:,} characters left out …]\n{text[-end:]}"


def printable(text: str) -> str:
    """Return a text without halves of characters, which neither UTF-8 nor the log can hold."""
    return text if text.isascii() else text.encode(errors="replace").decode()


async def keep(computer: Computer, call: str, stdout: str, stderr: str = "", *, cut: bool = False) -> Kept:
    """Bound what was printed; `cut` says that some of it was lost already."""
    shown = clip(stdout), clip(stderr)
    if shown == (stdout, stderr):
        return Kept(stdout, stderr, cut, None)
    whole = f"{stdout}\n==> standard error <==\n{stderr}" if stderr else stdout
    return Kept(*shown, True, await spool(computer, call, whole))


async def spool(computer: Computer, call: str, text: str) -> str | None:
    """Put a text where the worker can read it; None when there is no room for it."""
    path = f"{FOLDER}/{call}.txt"
    try:
        async with computer.files() as files:
            await files.write(path, text)
    except SkepError:  # the act itself is done, and what is shown of it has to do
        return None
    return path
