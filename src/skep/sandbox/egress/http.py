"""Read the heads of HTTP/1 messages, strictly: what two readers could understand differently is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import urlsplit

HEAD_LIMIT = 64 << 10
_FIELDS_LIMIT = 200
_METHOD = re.compile(rb"[A-Z][A-Z-]{0,31}")
#: One way to match each line and no other: a pattern with choices would take hours over a line made for it.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})( [^\x00-\x08\x0a-\x1f\x7f]*)?")

#: How a body ends: after so many bytes, with its last chunk, or with the connection.
Framing = int | Literal["chunks", "end"]
Fields = tuple[tuple[str, str], ...]


class Malformed(Exception):
    """The bytes are not a request that can be passed on safely."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first lines of a request."""

    method: str
    target: str
    version: str
    fields: Fields

    def values(self, name: str) -> list[str]:
        return _values(self.fields, name)

    @property
    def length(self) -> int | None:
        """How many bytes of body follow; None when it comes in chunks."""
        encodings, lengths = self.values("transfer-encoding"), self.values("content-length")
        if encodings:
            if lengths or self.version != "HTTP/1.1" or [encoding.lower() for encoding in encodings] != ["chunked"]:
                raise Malformed("the length of the body is stated in two ways")
            return None
        if len(lengths) > 1 or any(not re.fullmatch(r"[0-9]{1,15}", length) for length in lengths):
            raise Malformed("the length of the body is not a number")
        return int(lengths[0]) if lengths else 0

    @property
    def framing(self) -> Framing:
        length = self.length
        return "chunks" if length is None else length

    @property
    def upgrades(self) -> bool:
        return bool(self.values("upgrade"))

    @property
    def wants_websocket(self) -> bool:
        """Say whether the request asks to go on in the one other protocol that is let through."""
        return [value.lower() for value in self.values("upgrade")] == ["websocket"] and self.method == "GET"

    @property
    def stays(self) -> bool:
        """Say whether the client means to send another request on the same connection."""
        return _stays(self.version, self.fields)

    def authority(self) -> tuple[str, int | None]:
        """Return the host and port that the request is for: its Host, with which its target has to agree."""
        hosts = self.values("host")
        if len(hosts) != 1:
            raise Malformed("a request needs one Host")
        host, port = split_authority(hosts[0])
        if not self._by_path:
            netloc = _absolute(self.target)[0]
            named, at = split_authority(netloc)
            if named.lower() != host.lower() or (at or 80) != (port or 80):
                raise Malformed("the address and the Host of the request disagree")
        return host, port

    def without(self, *names: str) -> Head:
        """Return the head without some fields, and without what Connection says of them."""
        fields = []
        for name, value in self.fields:
            if name.lower() == "connection":
                words = [word.strip() for word in value.split(",")]
                kept = ", ".join(word for word in words if word and word.lower() not in names)
                fields += [(name, kept)] if kept else []
            elif name.lower() not in names:
                fields.append((name, value))
        return replace(self, fields=tuple(fields))

    def encode(self) -> bytes:
        """Write the head as it goes to the server: by path, and without what was meant for a proxy."""
        target = self.target if self._by_path else _absolute(self.target)[1]
        lines = [f"{self.method} {target} {self.version}"]
        lines += [f"{name}: {value}" for name, value in self.fields if not name.lower().startswith("proxy-")]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"

    @property
    def _by_path(self) -> bool:
        return self.target.startswith("/") or (self.target == "*" and self.method == "OPTIONS")


@dataclass(frozen=True, slots=True)
class Answer:
    """The first lines of what a server answers."""

    status: int
    version: str
    first: bytes
    fields: Fields

    def values(self, name: str) -> list[str]:
        return _values(self.fields, name)

    @property
    def is_interim(self) -> bool:
        return 100 <= self.status < 200 and self.status != 101

    @property
    def stays(self) -> bool:
        return _stays(self.version, self.fields)

    @property
    def is_plain(self) -> bool:
        """Say whether the body can be read as it is."""
        return all(value.lower() == "identity" for value in self.values("content-encoding"))

    def framing(self, method: str) -> Framing:
        """Say how the body ends, as an answer to a request with this method."""
        if method == "HEAD" or self.status in (204, 304) or self.status < 200:
            return 0
        encodings, lengths = self.values("transfer-encoding"), set(self.values("content-length"))
        if encodings:
            if [encoding.lower() for encoding in encodings] != ["chunked"]:
                raise Malformed("the answer comes in an encoding that cannot be passed on")
            return "chunks"
        if not lengths:
            return "end"
        if len(lengths) > 1 or not re.fullmatch(r"[0-9]{1,15}", next(iter(lengths))):
            raise Malformed("the length of the answer is not a number")
        return int(lengths.pop())

    def encode(self) -> bytes:
        chunked = bool(self.values("transfer-encoding"))
        lines = [
            f"{name}: {value}".encode("latin-1")
            for name, value in self.fields
            if not (chunked and name.lower() in ("content-length", "trailer"))
        ]
        return b"\r\n".join([self.first, *lines]) + b"\r\n\r\n"


def parse_head(block: bytes) -> Head:
    """Read the head of a request, given with the empty line that ends it."""
    first, *lines = block[:-4].split(b"\r\n")
    parts = first.split(b" ")
    if len(parts) != 3 or not _METHOD.fullmatch(parts[0]) or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise Malformed("this is not an HTTP/1 request")
    if not re.fullmatch(rb"[\x21-\x7e\x80-\xff]+", parts[1]):
        raise Malformed("the address of the request is malformed")
    return Head(parts[0].decode(), parts[1].decode("latin-1"), parts[2].decode(), _parse_fields(lines))


def parse_answer(block: bytes) -> Answer:
    """Read the head of an answer, given with the empty line that ends it."""
    first, *lines = block[:-4].split(b"\r\n")
    match = _STATUS.fullmatch(first)
    if match is None:
        raise Malformed("the answer is not HTTP/1")
    return Answer(int(match[2]), f"HTTP/1.{match[1].decode()}", first, _parse_fields(lines))


def split_authority(text: str) -> tuple[str, int | None]:
    """Split `host:port`; the port may be left out."""
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        return text, None
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise Malformed("the port is not a number")
    return host, int(port)


def refusal(status: str, message: str) -> bytes:
    """Answer a request that is not passed on, for a person or a model to read."""
    body = message.encode() + b"\n"
    reason = message.splitlines()[0][:200].encode("ascii", "replace").decode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        "X-Skep-Blocked: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _absolute(target: str) -> tuple[str, str]:
    """Return the authority and the path of an address that is written out."""
    try:
        parts = urlsplit(target)
    except ValueError as error:
        raise Malformed("the address of the request is malformed") from error
    if parts.scheme != "http" or not parts.netloc or "@" in parts.netloc:
        raise Malformed("the address of the request is not one of HTTP")
    return parts.netloc, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _parse_fields(lines: list[bytes]) -> Fields:
    if len(lines) > _FIELDS_LIMIT:
        raise Malformed("there are too many headers")
    fields = []
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise Malformed("a header is malformed")
        fields.append((match[1].decode("latin-1"), match[2].strip(b" \t").decode("latin-1")))
    return tuple(fields)


def _values(fields: Fields, name: str) -> list[str]:
    return [value for field, value in fields if field.lower() == name]


def _stays(version: str, fields: Fields) -> bool:
    words = {word.strip().lower() for value in _values(fields, "connection") for word in value.split(",")}
    return "close" not in words and (version == "HTTP/1.1" or "keep-alive" in words)
