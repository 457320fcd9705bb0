"""Where an answer ends: the framing of HTTP/1 answers, as far as it has to be known to pass the next request on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from skep.sandbox.egress.http import Head

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
SWITCHING = 101


@dataclass(frozen=True, slots=True)
class Answer:
    """The first lines of an answer."""

    status: int
    persistent: bool
    #: How many bytes of body follow: None for as many as come before the end, "chunked" for what says so itself.
    length: int | str | None

    @property
    def interim(self) -> bool:
        return 100 <= self.status < 200 and self.status != SWITCHING


def parse_answer(block: bytes, request: Head) -> Answer | None:
    """Read the head of an answer to a request; None if it is not one, which then goes on as it is to its end."""
    first, *lines = block[:-4].split(b"\r\n")
    match = _STATUS.fullmatch(first)
    if match is None or not block.endswith(b"\r\n\r\n"):
        return None
    fields: dict[str, list[str]] = {}
    for line in lines:
        name, _, value = line.decode("latin-1").partition(":")
        fields.setdefault(name.strip().lower(), []).append(value.strip())
    status = int(match[2])
    length = _length(status, fields, request)
    tokens = _tokens(fields.get("connection", []))
    lasting = "close" not in tokens if match[1] == b"1" else "keep-alive" in tokens
    return Answer(status, lasting and length is not None and _stays(request), length)


def _length(status: int, fields: dict[str, list[str]], request: Head) -> int | str | None:
    if request.method == "HEAD" or status < 200 or status in (204, 304):
        return 0
    if encodings := fields.get("transfer-encoding"):
        return "chunked" if [encoding.lower() for encoding in encodings] == ["chunked"] else None
    lengths = set(fields.get("content-length", []))
    return int(text) if len(lengths) == 1 and re.fullmatch("[0-9]{1,15}", text := lengths.pop()) else None


def _stays(request: Head) -> bool:
    tokens = _tokens(request.values("connection"))
    return "close" not in tokens if request.version == "HTTP/1.1" else "keep-alive" in tokens


def _tokens(values: list[str]) -> set[str]:
    return {token.strip().lower() for value in values for token in value.split(",")}
