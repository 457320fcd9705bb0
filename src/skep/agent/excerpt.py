"""Some lines of a file that may be of any size, gathered from its bytes as they come."""

from __future__ import annotations

#: The most that one reading returns.
MOST_BYTES = 24 << 10


class Excerpt:
    """Lines from `start` on, at most `lines` of them and 24 KiB. It keeps no more than that."""

    def __init__(self, start: int, lines: int) -> None:
        self._line = 1
        self._start = start
        self._end = start + lines
        self._kept = bytearray()
        self._cut = False
        self._more = False
        self._empty = True

    def feed(self, chunk: bytes) -> bool:
        """Take the next bytes; say whether enough has been seen."""
        at = 0
        while at < len(chunk):
            self._empty = False
            if self._line >= self._end:
                self._more = True
                return True
            newline = chunk.find(b"\n", at)
            after = len(chunk) if newline < 0 else newline + 1
            if self._line >= self._start:
                room = MOST_BYTES - len(self._kept)
                self._kept += chunk[at : min(after, at + room)]
                if after - at > room:
                    self._cut = True
                    return True
            if newline >= 0:
                self._line += 1
            at = after
        return False

    def result(self) -> tuple[str, int | None, str]:
        """Return the text, the line to go on from, and a remark if one is needed."""
        if self._empty:
            return "", None, "the file is empty"
        if b"\0" in self._kept:
            return "", None, "this is not a text; use a program to look at it"
        if not self._kept:
            return "", None, f"the file has no line {self._start}"
        if not self._cut:
            return self._kept.decode(errors="replace"), self._line if self._more else None, ""
        whole = self._kept.rfind(b"\n") + 1
        if whole:  # go on with the line that did not fit
            return self._kept[:whole].decode(errors="replace"), self._line, ""
        note = f"line {self._line} is longer than {MOST_BYTES:,} bytes: this is its beginning"
        return self._kept.decode(errors="replace"), self._line + 1, note
