"""Read the heads of HTTP/1 requests, strictly: what two readers could understand differently is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

HEAD_LIMIT = 64 << 10
_METHOD = re.compile(rb"[A-Z][A-Z-]{0,31}")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")


class Malformed(Exception):
    """The bytes are not a request that can be passed on safely."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first lines of a request."""

    method: str
    target: str
    version: str
    fields: tuple[tuple[str, str], ...]

    def values(self, name: str) -> list[str]:
        return [value for field, value in self.fields if field.lower() == name]

    @property
    def length(self) -> int | None:
        """How many bytes of body follow; None when it comes in chunks."""
        encodings, lengths = self.values("transfer-encoding"), self.values("content-length")
        if encodings:
            if lengths or [encoding.lower() for encoding in encodings] != ["chunked"]:
                raise Malformed("the length of the body is stated in two ways")
            return None
        if len(set(lengths)) > 1 or any(not re.fullmatch(r"[0-9]{1,15}", length) for length in lengths):
            raise Malformed("the length of the body is not a number")
        return int(lengths[0]) if lengths else 0

    @property
    def upgrades(self) -> bool:
        return bool(self.values("upgrade"))

    def authority(self) -> tuple[str, int | None]:
        """Return the host and port that the request is for: its Host, with which its target has to agree."""
        hosts = self.values("host")
        if len(hosts) != 1:
            raise Malformed("a request needs one Host")
        host, port = split_authority(hosts[0])
        if not self.target.startswith(("/", "*")):
            parts = urlsplit(self.target)
            if parts.scheme != "http" or "@" in parts.netloc or split_authority(parts.netloc) != (host, port):
                raise Malformed("the address and the Host of the request disagree")
        return host, port

    def encode(self) -> bytes:
        """Write the head as it goes to the server: by path, and without what was meant for a proxy."""
        target = self.target
        if not target.startswith(("/", "*")):
            parts = urlsplit(target)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"{self.method} {target} {self.version}"]
        lines += [f"{name}: {value}" for name, value in self.fields if not name.lower().startswith("proxy-")]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def parse_head(block: bytes) -> Head:
    """Read a head, given with the empty line that ends it."""
    first, *lines = block[:-4].split(b"\r\n")
    parts = first.split(b" ")
    if len(parts) != 3 or not _METHOD.fullmatch(parts[0]) or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise Malformed("this is not an HTTP/1 request")
    if not re.fullmatch(rb"[\x21-\x7e\x80-\xff]+", parts[1]) or len(lines) > 200:
        raise Malformed("the request line or the number of headers is out of bounds")
    fields = []
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise Malformed("a header is malformed")
        fields.append((match[1].decode("latin-1"), match[2].decode("latin-1")))
    return Head(parts[0].decode(), parts[1].decode("latin-1"), parts[2].decode(), tuple(fields))


def split_authority(text: str) -> tuple[str, int | None]:
    """Split `host:port`; the port may be left out."""
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        return text, None
    if not re.fullmatch(r"[0-9]{1,5}", port):
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
