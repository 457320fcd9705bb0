"""Stand-ins for secrets: what the sandbox sees, and where the real value takes its place."""

from __future__ import annotations

import binascii
import re
import secrets as random
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from skep.errors import InvalidRequest
from skep.sandbox.egress.http import Head
from skep.sandbox.egress.policy import parse_rule

PREFIX = "skep-secret-"
SHORTEST = 8
_LONGEST = 16 << 10
#: Who the request is for, and where it ends, must not depend on a secret.
_FRAMING = frozenset({"connection", "content-length", "host", "trailer", "transfer-encoding", "upgrade"})


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A stand-in, and the only place where it is worth anything: one header towards one host."""

    name: str
    text: str
    host: str
    ports: Sequence[int]
    header: str

    @classmethod
    def make(cls, name: str, *, host: str, header: str) -> Placeholder:
        rule = parse_rule(host)
        if rule.below:
            raise InvalidRequest(f"the secret {name!r} is for {host!r}, which is many hosts", hint="name one host")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", name):
            raise InvalidRequest(f"{name[:100]!r} cannot name a secret", hint="use a name such as API_KEY")
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}", header) or header.lower() in _FRAMING:
            raise InvalidRequest(
                f"the secret {name!r} cannot go into the header {header[:100]!r}", hint="use one such as Authorization"
            )
        return cls(name, PREFIX + random.token_hex(20), rule.host, tuple(sorted(rule.ports)), header.lower())

    def belongs_to(self, host: str, port: int) -> bool:
        return host == self.host and port in self.ports

    def is_in(self, text: str) -> bool:
        return self.text in text or self.text in _credentials(text)

    def put(self, value: str, text: str) -> str:
        """Put the value where the placeholder stands, also within a user name and password."""
        if self.text in text:
            return text.replace(self.text, value)
        known = _credentials(text)
        if self.text not in known:
            return text
        code = b64encode(known.replace(self.text, value).encode("latin-1"))
        return f"{text.partition(' ')[0]} {code.decode()}"


def unusable(value: object) -> str | None:
    """Say why a text cannot take a placeholder's place; None if it can. The text itself is not repeated."""
    if not isinstance(value, str):
        return "it is not text"
    if not SHORTEST <= len(value) <= _LONGEST:
        # A shorter one could not be told from ordinary text in what a host answers.
        return f"it has fewer than {SHORTEST} or more than {_LONGEST} characters"
    if not re.fullmatch(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?", value):
        return "it has characters that no header can hold"
    return None


def swap(head: Head, placeholder: Placeholder, value: str) -> tuple[Head, set[bytes]]:
    """Put the value where the placeholder stands in its own header; return also what must not come back.

    A part of an answer is not asked for: half a secret would not be recognised.
    """
    fields, secret = [], {value.encode()}
    for name, text in head.fields:
        if name.lower() == placeholder.header and placeholder.is_in(text):
            swapped = placeholder.put(value, text)
            if value not in swapped:
                secret.add(swapped.partition(" ")[2].encode())
            fields.append((name, swapped))
        elif name.lower() not in ("range", "if-range"):
            fields.append((name, text))
    return replace(head, fields=tuple(fields)), secret


def readable(head: Head) -> Head:
    """Ask for an answer that can be searched for secrets, which compression would hide."""
    plain = head.without("accept-encoding", "sec-websocket-extensions", "te")
    return replace(plain, fields=(*plain.fields, ("Accept-Encoding", "identity")))


def strays(
    head: Head, placeholders: Iterable[Placeholder], *, host: str, port: int, secure: bool
) -> list[tuple[Placeholder, str]]:
    """List the placeholders that stand where they are worth nothing, with the place."""
    found = []
    for placeholder in placeholders:
        if placeholder.text in head.target:
            found.append((placeholder, "the address"))
        for name, text in head.fields:
            at_home = secure and placeholder.belongs_to(host, port) and name.lower() == placeholder.header
            if not at_home and (placeholder.is_in(text) or placeholder.text in name):
                found.append((placeholder, f"the header {name[:64]} towards {host}"))
    return found


class Finder:
    """Looks for texts in a stream, also where one is spread over two pieces. Each is found once."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self._texts = {text for text in texts if text}
        self._longest = max(map(len, self._texts), default=0)
        self._tail = b""

    def found(self, piece: bytes) -> list[bytes]:
        if not self._texts:
            return []
        window = self._tail + piece
        self._tail = window[-self._longest + 1 :] if self._longest > 1 else b""
        here = [text for text in self._texts if text in window]
        self._texts.difference_update(here)
        return here


class Mask:
    """Takes texts out of a stream: each is replaced by stars, as many as it has letters."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        # The longest first: a text may hold another.
        self._texts = sorted({text for text in texts if text}, key=len, reverse=True)
        self._held = b""

    def __bool__(self) -> bool:
        return bool(self._texts)

    def whole(self, text: bytes) -> bytes:
        """Mask something that is not a stream."""
        for secret in self._texts:
            text = text.replace(secret, b"*" * len(secret))
        return text

    def __call__(self, piece: bytes) -> bytes:
        """Return what can be passed on; bytes that may be the beginning of a text are held back."""
        if not self._texts:
            return piece
        window = self.whole(self._held + piece)
        keep = self._beginning(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def rest(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _beginning(self, window: bytes) -> int:
        """Return how many last bytes of a window could be the beginning of a text."""
        return max((_overlap(window, text) for text in self._texts), default=0)


def _overlap(window: bytes, text: bytes) -> int:
    """Return how many last bytes of a window are the first of a text."""
    tail = window[-len(text) + 1 :] if len(text) > 1 else b""
    at = tail.find(text[:1])
    while at >= 0:
        if text.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(text[:1], at + 1)
    return 0


def _credentials(text: str) -> str:
    """Return the user name and password of a header that has them encoded, nothing of any other."""
    scheme, _, code = text.partition(" ")
    if scheme.lower() != "basic" or len(code) > _LONGEST * 2:
        return ""
    try:
        return b64decode(code.strip(), validate=True).decode("latin-1")
    except (binascii.Error, ValueError):
        return ""
