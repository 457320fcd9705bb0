"""The frames of the conversation: a byte that says what it is, an id, a length, and as many bytes.

The controller makes up the ids: of a command, a file, a watch, a connection, a question. Numbers are fixed structures;
names of files travel as text in which each character is one byte, so that any name there is can be told.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

VERSION = 1

HEAD = struct.Struct("!BII")
#: What a frame may carry, from the twin and to it: a command with its environment goes in whole.
REPORT_LIMIT = 1 << 20
ORDER_LIMIT = 72 << 20
#: How much of a stream may be on its way and in neither end's hands; and how much of it one frame carries.
WINDOW = 1 << 20
PIECE = 1 << 18

# Orders.
START, INPUT, INPUT_END, CREDIT, SIGNAL, RESIZE, RELEASE, PAUSE, RESUME, KILL_ALL = range(1, 11)
COUNT, FILE, WATCH, CONNECT, PING, LIMITS, END_MARKED = range(11, 18)
# Reports.
READY, STARTED, REFUSED, DATA, END, TAKEN, CLOSED, EXITED, DONE, FAILED, PONG = range(32, 43)

#: Which stream: what goes both ways (a channel, a connection, the bytes of a file), standard output, standard error.
BOTH, OUT, ERR = 0, 1, 2
#: Where the start of a command failed; the numbers are the native agent's.
AT_PAYLOAD, AT_FORK, AT_TERMINAL, AT_LIMIT, AT_CWD, AT_EXEC = range(1, 7)
#: What a command's input is.
NOTHING, PIPE, CHANNEL, TERMINAL = range(4)

STREAM = struct.Struct("!B")
AMOUNT = struct.Struct("!BI")
COUNTED = struct.Struct("!I")
START_HEAD = struct.Struct("!BHH")
SIGNALLED = struct.Struct("!BBB")
SIZE = struct.Struct("!HH")
REFUSAL = struct.Struct("!II")
#: Code, signal, microseconds of the user's and the system's, kibibytes at the most, and the limit that ended it.
EXIT = struct.Struct("!iiQQQB")
#: The limits that the twin itself holds, in an exit.
MEMORY, PROCESSES, DISK = 1, 2, 3


class Frame(NamedTuple):
    kind: int
    id: int
    payload: bytes


class Violation(Exception):
    """Something was said that is never said."""


def frame(kind: int, number: int, payload: bytes = b"") -> bytes:
    """Return a frame as it travels."""
    return HEAD.pack(kind, number, len(payload)) + payload


class Parser:
    """Takes bytes as they come and yields whole frames; it keeps no more than one frame may have."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._held += data
        at = 0
        try:
            while len(self._held) - at >= HEAD.size:
                kind, number, length = HEAD.unpack_from(self._held, at)
                if length > self._limit:
                    raise Violation(f"a frame of {length} bytes")
                end = at + HEAD.size + length
                if len(self._held) < end:
                    break
                payload = bytes(memoryview(self._held)[at + HEAD.size : end])
                at = end
                yield Frame(kind, number, payload)
        finally:
            del self._held[:at]


def name_out(name: bytes) -> str:
    """Return a name as it travels in JSON."""
    return name.decode("latin-1")


def name_in(text: str) -> bytes:
    """Return a name that came in JSON."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError as error:
        raise Violation("a name with characters that are no bytes") from error
