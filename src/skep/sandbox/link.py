"""The way to a twin: a byte stream that a mechanism provides, and the house around it.

A mechanism that cannot hand descriptors over (another kernel, another machine) subclasses `Link` and `Housing`, starts
the program `stream.twin_program()` inside, and passes both to `StreamSandbox.over`.
"""

from __future__ import annotations

import abc
import base64
import binascii
import socket

from skep.errors import SandboxLost
from skep.sandbox.pipes import ReadEnd, WriteEnd

#: What one line of armour may carry, and the most of an unfinished line that is kept.
_LINE_BYTES = 48 << 10
_LINE_LIMIT = 4 << 20


class Link(abc.ABC):
    """A byte stream to a twin inside. One task reads, one writes."""

    @abc.abstractmethod
    async def read(self) -> bytes:
        """Return the next bytes as soon as there are any; nothing at the end, when the twin or its house is gone."""

    @abc.abstractmethod
    async def write(self, data: bytes) -> None:
        """Hand bytes over, waiting while there is no room; `SandboxLost` or `ConnectionError` when it is gone."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Hang up, so that the twin sees the end of its input. Safe to repeat; a `read` that waits comes to its end."""


class Housing(abc.ABC):
    """What a mechanism does around the twin."""

    id: str

    @abc.abstractmethod
    async def alive(self) -> bool:
        """Say whether the house still stands. It is asked only while the link is open."""

    async def pause(self) -> bool:
        """Halt every process inside, and say whether that was done; if not, the twin does it."""
        return False

    async def resume(self) -> bool:
        """Let halted processes go on, and say whether that was done; if not, the twin does it."""
        return False

    async def connect(self, port: int) -> socket.socket | None:
        """Connect to a port on loopback inside; None for a tunnel through the twin. Nobody there is `NotFound`."""
        return None

    def forgo(self) -> None:
        """Let the end be one for good, if the house was made to be kept."""
        return

    @abc.abstractmethod
    async def end(self) -> None:
        """Stop everything and free everything. Safe to repeat; called after the link was closed, also by a failure."""


class PipeLink(Link):
    """A link over the controller's ends of a twin's standard output and input, which it owns."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = ReadEnd(reading)
        self._writing = WriteEnd(writing)

    async def read(self) -> bytes:
        return await self._reading.read()

    async def write(self, data: bytes) -> None:
        await self._writing.write(data)

    async def close(self) -> None:
        self._writing.close()
        self._reading.close()


def armoured(link: Link) -> Link:
    """Carry the bytes as lines of base64, for a link that passes only text; the twin is started with `--armour`."""
    return _Armour(link)


class _Armour(Link):
    def __init__(self, link: Link) -> None:
        self._link = link
        self._rest = b""

    async def read(self) -> bytes:
        while True:
            piece = await self._link.read()
            if not piece:
                return b""
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > _LINE_LIMIT:
                raise SandboxLost("the twin sent a line without an end", hint="start another sandbox")
            if data := b"".join(_opened(line) for line in lines):
                return data

    async def write(self, data: bytes) -> None:
        pieces = (data[start : start + _LINE_BYTES] for start in range(0, len(data), _LINE_BYTES))
        await self._link.write(b"".join(base64.b64encode(piece) + b"\n" for piece in pieces))

    async def close(self) -> None:
        await self._link.close()


def _opened(line: bytes) -> bytes:
    try:
        # A terminal on the way may end lines with a carriage return too.
        return base64.b64decode(line.rstrip(b"\r"), validate=True)
    except binascii.Error as error:
        raise SandboxLost("the twin sent a line that is not armoured", hint="start another sandbox") from error
