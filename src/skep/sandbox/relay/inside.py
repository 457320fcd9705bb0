"""The relay: start a program, and carry its bytes over a line that may lose its tail and be replaced.

It runs in the sandbox with whatever Python is there (3.9 or newer), as `python3 -I inside.py PATIENCE PROGRAM …`. The
line is its standard input and output; each message on it is one line of text:

- `D number length base64`  bytes, numbered from 0 in each direction; no bytes are the end
- `A number`                everything before this number has been dealt with
- `R number`                say again everything from this number on
- `H`                       the other end will be quiet for as long as it likes, until its next message
- `P`                       the other end is there
"""

from __future__ import annotations

import base64
import collections
import os
import selectors
import sys
import time

#: What one message carries; what may be on its way unacknowledged; and how much is dealt with between acknowledgements.
PIECE_BYTES = 48 << 10
WINDOW_BYTES = 4 << 20
ACKNOWLEDGE_BYTES = WINDOW_BYTES // 4
#: No message is longer.
LINE_LIMIT = 80 << 10
_TURN_S = 1.0
#: A turn that took so much longer is one in which the machine stood still.
_ASLEEP_S = 4.0


class Ledger:
    """What one end has said and the other not acknowledged; and how far it has heard the other itself."""

    def __init__(self) -> None:
        self._said: collections.deque[tuple[int, int, bytes]] = collections.deque()
        self._next = 0
        self._unacknowledged = 0
        self._expected = 0
        self._dealt = 0
        self._since = 0
        self._asked = -1
        self._wanted = 0

    @property
    def full(self) -> bool:
        return self._unacknowledged >= WINDOW_BYTES

    @property
    def settled(self) -> bool:
        """Whether all that was said has been dealt with."""
        return not self._said

    def say(self, data: bytes) -> bytes:
        """Return the message for at most `PIECE_BYTES`, and keep it."""
        line = b"D %d %d %s\n" % (self._next, len(data), base64.b64encode(data))
        self._said.append((self._next, len(data), line))
        self._next += 1
        self._unacknowledged += len(data)
        return line

    def again(self) -> bytes:
        """Return everything once more that may have been missed. What came before may have been cut in its line."""
        missed = b"".join(line for number, _, line in self._said if number >= self._wanted)
        return b"\nA %d\n%s" % (self._dealt, missed)

    def ask(self) -> bytes:
        """Return the message that asks for what was missed."""
        self._asked = self._expected
        return b"\nR %d\n" % self._expected

    def dealt(self, size: int) -> bytes:
        """Count one message as dealt with, and return the acknowledgement if one is due."""
        self._dealt += 1
        self._since += size
        if size and self._since < ACKNOWLEDGE_BYTES:
            return b""
        self._since = 0
        return b"A %d\n" % self._dealt

    def hear(self, line: bytes) -> tuple[str, bytes]:
        """Take one message in: return what it is, and the bytes that it brings.

        A message that was cut, or has come before, is nothing; with `G`, a gap, the other end has to be asked.
        """
        try:
            return self._understood(*line.decode("ascii").split(" "))
        except ValueError:
            return "", b""

    def _understood(self, kind: str, *words: str) -> tuple[str, bytes]:
        if kind == "D":
            number, length, text = words
            return self._heard(int(number), int(length), base64.b64decode(text, validate=True))
        if kind in ("A", "R"):
            (number,) = words
            self._owe(int(number), again=kind == "R")
            return kind, b""
        return (kind, b"") if kind in ("H", "P") and not words else ("", b"")

    def _owe(self, number: int, *, again: bool) -> None:
        """Note from where on the other end lacks something: has not dealt with it, or asks for it again."""
        if again:
            self._wanted = number
            return
        while self._said and self._said[0][0] < number:
            self._unacknowledged -= self._said.popleft()[1]

    def _heard(self, number: int, length: int, data: bytes) -> tuple[str, bytes]:
        if length != len(data) or number < self._expected:
            return "", b""
        if number > self._expected:
            return ("" if self._asked == self._expected else "G"), b""
        self._expected += 1
        return "D", data


class Relay:
    """Runs the program and carries its bytes."""

    def __init__(self, argv: list[str], patience_s: float) -> None:
        self._child, self._into, self._from = _started(argv)
        self._ledger = Ledger()
        self._patience_s = patience_s
        self._heard_at = time.monotonic()
        self._held = False
        self._line = b""
        self._out = bytearray()
        self._given: collections.deque[tuple[int, memoryview]] = collections.deque()
        self._open = {0, 1, self._from, self._into}
        for fd in self._open:
            os.set_blocking(fd, False)

    def run(self) -> None:
        """Carry until the program has ended and the other end knows all of it, or is there no more."""
        while self._from in self._open or (self._into in self._open and not self._ledger.settled) or self._out:
            began = time.monotonic()
            self._turn()
            now = time.monotonic()
            if now - began > _TURN_S + _ASLEEP_S:
                self._heard_at = now
            if not self._held and now - self._heard_at > self._patience_s:
                self._out.clear()
                self._hang_up()
        os.waitpid(self._child, 0)

    def _turn(self) -> None:
        wanted = [(0, selectors.EVENT_READ, self._hear)]
        if not self._ledger.full and len(self._out) < WINDOW_BYTES:
            wanted.append((self._from, selectors.EVENT_READ, self._take))
        if self._out:
            wanted.append((1, selectors.EVENT_WRITE, self._tell))
        if self._given:
            wanted.append((self._into, selectors.EVENT_WRITE, self._give))
        with selectors.PollSelector() as selector:
            for fd, events, call in wanted:
                if fd in self._open:
                    selector.register(fd, events, call)
            ready = selector.select(_TURN_S)
        for key, _ in ready:
            key.data()

    def _hear(self) -> None:
        data = os.read(0, 1 << 18)
        if not data:
            self._open.discard(0)
            self._hang_up()
            return
        self._heard_at, self._held = time.monotonic(), False
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > LINE_LIMIT:
            self._line = b""
        for line in lines:
            self._obey(line)

    def _obey(self, line: bytes) -> None:
        kind, data = self._ledger.hear(line)
        if kind == "D" and data:
            self._given.append((len(data), memoryview(data)))
        elif kind == "D":
            self._hang_up()
        elif kind == "G":
            self._out += self._ledger.ask()
        elif kind == "R":
            self._out += self._ledger.again()
        elif kind == "H":
            self._held = True

    def _give(self) -> None:
        try:
            while self._given:
                size, rest = self._given.popleft()
                rest = rest[os.write(self._into, rest) :]
                if rest:
                    self._given.appendleft((size, rest))
                    return
                self._out += self._ledger.dealt(size)
        except BlockingIOError:
            self._given.appendleft((size, rest))
        except BrokenPipeError:
            self._hang_up()

    def _take(self) -> None:
        data = os.read(self._from, PIECE_BYTES)
        if not data:
            self._open.discard(self._from)
        self._out += self._ledger.say(data)

    def _tell(self) -> None:
        try:
            written = os.write(1, self._out[: 1 << 18])
            del self._out[:written]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._open.discard(1)
            self._out.clear()
            self._hang_up()

    def _hang_up(self) -> None:
        """Let the program see the end of its input, upon which it ends what it has started, and itself."""
        self._given.clear()
        if self._into in self._open:
            self._open.discard(self._into)
            os.close(self._into)


def _started(argv: list[str]) -> tuple[int, int, int]:
    """Start a program; return its number, and the ends of its input and output."""
    (theirs, into), (from_, ours) = os.pipe(), os.pipe()
    streams = [(os.POSIX_SPAWN_DUP2, theirs, 0), (os.POSIX_SPAWN_DUP2, ours, 1)]
    child = os.posix_spawnp(argv[0], argv, os.environ, file_actions=streams)
    os.close(theirs)
    os.close(ours)
    return child, into, from_


if __name__ == "__main__":
    Relay(sys.argv[2:], float(sys.argv[1])).run()
