"""Look at single places of a stack, as a program inside would see them, without mounting anything."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import closing

from skep.workspace.overlay import opened
from skep.workspace.sight import Entry, Sight

_MOST_BYTES = 64 << 20


class Glimpse(Sight):
    """Sees no more of the uppermost folder than some names."""

    def __init__(self, layers: Sequence[str], names: Collection[str]) -> None:
        self._names = names
        super().__init__(layers)

    def listing(self) -> dict[str, list[int]]:
        found = super().listing()
        return found if self.prefix else {name: held for name, held in found.items() if name in self._names}


class View:
    """What a stack shows at one place or another. Whoever can write to it may change it at any time."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = layers

    def find(self, path: str) -> Entry | None:
        """Describe what is at a path; no link on the way is followed."""
        *folders, name = path.split("/")
        with closing(Sight(self._layers)) as sight:
            return _named(sight, name) if _entered(sight, folders) else None

    def names(self, path: str = "") -> list[str]:
        """List what a folder shows; nothing if there is no such folder."""
        with closing(Sight(self._layers)) as sight:
            if not _entered(sight, path.split("/") if path else []):
                return []
            listing = sight.listing()
            return [name for name, held in listing.items() if sight.kind(name, held[0]) not in (None, "whiteout")]

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a file, or None if there is none; of one that is too large only the beginning."""
        found = self.find(path)
        if found is None or found.kind != "file":
            return None
        with os.fdopen(opened(found), "rb") as file:
            return file.read(_MOST_BYTES)


def _entered(sight: Sight, folders: list[str]) -> bool:
    for folder in folders:
        found = _named(sight, folder)
        if found is None or found.kind != "folder":
            return False
        sight.enter(folder, sight.listing()[folder])
    return True


def _named(sight: Sight, name: str) -> Entry | None:
    holders = sight.listing().get(name)
    found = sight.find(name, holders[0]) if holders else None
    return None if found is None or found.kind == "whiteout" else found
