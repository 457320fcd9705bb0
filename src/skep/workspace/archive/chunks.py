"""Chunks: pieces of content, each kept once under a name that follows from what it holds."""

from __future__ import annotations

from skep.errors import ArchiveDamaged, NotFound
from skep.workspace.archive.cipher import DAMAGE_HINT, SMALLEST, Cipher
from skep.workspace.archive.objects import Store

PREFIX = "chunks/"


class Chunks:
    """The chunks of one store, under one key. May be used by several threads."""

    def __init__(self, store: Store, cipher: Cipher) -> None:
        self._store = store
        self._cipher = cipher
        self._there: set[str] = set()

    def survey(self) -> None:
        """Find out what is there, so that it need not be put again."""
        self._there = {stored.name.rpartition("/")[2] for stored in self._store.list(PREFIX) if stored.size >= SMALLEST}

    def has(self, chunk: str) -> bool:
        return chunk in self._there

    def keep(self, plain: bytes) -> tuple[str, int]:
        """Put content into the store unless it is there; return its name and how much was written for it."""
        chunk = self._cipher.key.name(plain)
        if chunk in self._there:
            return chunk, 0
        sealed = self._cipher.seal(plain, address(chunk))
        self._store.put(address(chunk), sealed)
        self._there.add(chunk)
        return chunk, len(sealed)

    def get(self, chunk: str) -> bytes:
        """Return content that is what its name says, or ArchiveDamaged."""
        name = address(chunk)
        try:
            sealed = self._store.get(name)
        except NotFound as error:
            raise ArchiveDamaged(f"{name} is missing", hint="restore an older version, or save again") from error
        plain = self._cipher.open(sealed, name)
        if self._cipher.key.name(plain) != chunk:
            raise ArchiveDamaged(f"{name} does not hold what its name says", hint=DAMAGE_HINT)
        return plain


def address(chunk: str) -> str:
    return f"{PREFIX}{chunk[:2]}/{chunk}"
