"""Stand-ins for secrets: what the sandbox sees, and where the real value takes its place."""

from __future__ import annotations

import secrets as random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from skep.sandbox.egress.http import Head

PREFIX = "skep-secret-"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A stand-in, and the only place where it is worth anything: one header towards one host."""

    name: str
    text: str
    host: str
    header: str

    @classmethod
    def make(cls, name: str, *, host: str, header: str) -> Placeholder:
        return cls(name, PREFIX + random.token_hex(20), host, header.lower())


def swap(head: Head, placeholder: Placeholder, value: str) -> Head:
    """Put the value where the placeholder stands in its own header, and ask for an answer that can be read.

    The answer is searched for the value before it goes in, which compression would hide.
    """
    fields = tuple(
        (name, text.replace(placeholder.text, value) if name.lower() == placeholder.header else text)
        for name, text in head.fields
        if name.lower() != "accept-encoding"
    )
    return replace(head, fields=(*fields, ("Accept-Encoding", "identity")))


def strays(
    head: Head, placeholders: Iterable[Placeholder], *, host: str, secure: bool
) -> list[tuple[Placeholder, str]]:
    """List the placeholders that stand where they are worth nothing, with the place."""
    found = []
    for placeholder in placeholders:
        if placeholder.text in head.target:
            found.append((placeholder, "the address"))
        for name, text in head.fields:
            at_home = secure and host == placeholder.host and name.lower() == placeholder.header
            if placeholder.text in text and not at_home:
                found.append((placeholder, f"the header {name} towards {host}"))
    return found


class Finder:
    """Looks for texts in a stream, also where one is spread over two pieces."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self._texts = [text for text in texts if text]
        self._tail = b""

    def found(self, piece: bytes) -> list[bytes]:
        window = self._tail + piece
        self._tail = window[-max(map(len, self._texts), default=1) + 1 :] if self._texts else b""
        return [text for text in self._texts if text in window]


class Mask:
    """Takes texts out of a stream: each is replaced by stars, as many as it has letters."""

    def __init__(self) -> None:
        self.texts: set[bytes] = set()
        self._held = b""

    def __call__(self, piece: bytes) -> bytes:
        """Return what can be passed on; bytes that may be the beginning of a text are held back."""
        if not self.texts:
            return piece
        window = self._held + piece
        for text in self.texts:
            window = window.replace(text, b"*" * len(text))
        keep = self._beginning(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def rest(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _beginning(self, window: bytes) -> int:
        """Return how many last bytes of a window could be the beginning of a text."""
        longest = max(map(len, self.texts)) - 1
        for size in range(min(longest, len(window)), 0, -1):
            if any(text.startswith(window[-size:]) for text in self.texts):
                return size
        return 0
