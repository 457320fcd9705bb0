"""Read whom a TLS client wants to speak to from its first message, which goes on unchanged."""

from __future__ import annotations

HANDSHAKE = 0x16
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_HOST_NAME = 0
_RECORD_LIMIT = 1 << 14
HELLO_LIMIT = 16 << 10


class Incomplete(Exception):
    """More bytes are needed to tell."""


class NotHello(Exception):
    """The bytes are not the first message of a TLS client, or not one that everybody reads alike."""


class _Part:
    """Bytes that are read from their start; reading past the end is `NotHello`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __bool__(self) -> bool:
        return bool(self._data)

    def take(self, size: int) -> bytes:
        if size > len(self._data):
            raise NotHello("it is shorter than it says")
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def part(self, size: int) -> _Part:
        """Take a part whose length is written before it in so many bytes."""
        return _Part(self.take(self.number(size)))


def server_name(data: bytes) -> str | None:
    """Return the name in a client's first message, None if it names nobody."""
    message = _Part(_first_message(data))
    message.take(2 + 32)
    message.part(1)
    message.part(2)
    message.part(1)
    if not message:
        return None
    extensions, names = message.part(2), []
    while extensions:
        kind, content = extensions.number(2), extensions.part(2)
        if kind == _SERVER_NAME:
            names.append(_host_name(content))
    if len(names) > 1 or message:
        raise NotHello("it names more than one server")
    return names[0] if names else None


def _host_name(content: _Part) -> str:
    entries = content.part(2)
    kind, name = entries.number(1), entries.part(2)
    if kind != _HOST_NAME or entries or content:
        raise NotHello("it does not name one server")
    try:
        return name.take(len(name._data)).decode("ascii")
    except UnicodeDecodeError as error:
        raise NotHello("the name is not one of a host") from error


def _first_message(data: bytes) -> bytes:
    """Put the client's hello together from the records it is spread over."""
    message, records = b"", _Records(data)
    while True:
        message += records.next()
        if message[:1] != bytes([_CLIENT_HELLO]):
            raise NotHello("it is another message")
        length = int.from_bytes(message[1:4], "big")
        if len(message) >= 4 and length > HELLO_LIMIT:
            raise NotHello("it is too long")
        if len(message) >= 4 + length and len(message) >= 4:
            return message[4 : 4 + length]


class _Records:
    """The records at the start of a stream."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def next(self) -> bytes:
        """Return what is in the next record; `Incomplete` if not all of it is there."""
        head = self._data[self._at : self._at + 5]
        if head and (head[0] != HANDSHAKE or head[1:2] not in (b"", b"\x03")):
            raise NotHello("it is not TLS")
        if len(head) < 5:
            raise Incomplete
        size = int.from_bytes(head[3:5], "big")
        if not 0 < size <= _RECORD_LIMIT:
            raise NotHello("a record has a length that no record has")
        content = self._data[self._at + 5 : self._at + 5 + size]
        if len(content) < size:
            raise Incomplete
        self._at += 5 + size
        return content
