"""Look at single places of a stack, as a program inside would see them, without mounting anything."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import closing

from skep.workspace.layers.overlay import opened
from skep.workspace.layers.sight import Entry, Sight

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
        with closing(_Look(self._layers)) as sight:
            return sight.named(name) if sight.entered(folders) else None

    def names(self, path: str = "") -> list[str]:
        """List what a folder shows; nothing if there is no such folder."""
        with closing(_Look(self._layers)) as sight:
            if not sight.entered(path.split("/") if path else []):
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


class _Look(Sight):
    """Finds single names without listing the folders that they are in."""

    def holders(self, name: str) -> list[int]:
        return [member for member in self._members[-1] if self.cursors[member].look(name) is not None]

    def named(self, name: str) -> Entry | None:
        # A path may be made of what an agent wrote: it must not lead out of the stack.
        holders = self.holders(name) if name not in ("", ".", "..") and "\0" not in name else []
        found = self.find(name, holders[0]) if holders else None
        return None if found is None or found.kind == "whiteout" else found

    def entered(self, folders: list[str]) -> bool:
        """Go down to a folder; False if there is none."""
        for folder in folders:
            found = self.named(folder)
            if found is None or found.kind != "folder":
                return False
            self.enter(folder, self.holders(folder))
        return True
