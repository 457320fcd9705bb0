"""Stand in one folder of a stack of layers, and see in it what the kernel's overlay would show."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skep.workspace.layers.cursor import Cursor, extended

OPAQUE = "user.overlay.opaque"
_WHITEOUT = "user.overlay.whiteout"

Kind = Literal["file", "folder", "link", "whiteout", "other"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in a stack, by its path below the top, and the layer that it comes from."""

    path: str
    kind: Kind
    layer: str
    stat: os.stat_result
    opaque: bool = False

    @property
    def host(self) -> str:
        """Where it is on the host. Open it with `opened`: such a path may be too long, and lead elsewhere by now."""
        return f"{self.layer}/{self.path}"


class Sight:
    """Stands in one folder of a stack, with a cursor in every layer that has a part in it."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = layers
        self.cursors: list[Cursor] = []
        self.prefix = ""
        self._members = [list(range(len(layers)))]
        try:
            for layer in layers:
                self.cursors.append(Cursor(layer))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        for cursor in self.cursors:
            cursor.close()
        self.cursors = []

    def listing(self) -> dict[str, list[int]]:
        """Tell which layers hold which names in this folder, uppermost first."""
        found: dict[str, list[int]] = {}
        for member in self._members[-1]:
            for name in self.cursors[member].names():
                found.setdefault(name, []).append(member)
        return found

    def find(self, name: str, holder: int) -> Entry | None:
        """Describe what one layer has by a name; None if it is gone by now."""
        found = self.cursors[holder].look(name)
        if found is None:
            return None
        kind = kind_of(found)
        if kind == "file" and not found.st_size and self._whiteout_by_attribute(name, holder):
            kind = "whiteout"
        return Entry(self.prefix + name, kind, self.layers[holder], found)

    def kind(self, name: str, holder: int) -> Kind | None:
        found = self.find(name, holder)
        return None if found is None else found.kind

    def folder(self, entry: Entry) -> int:
        """Return the open folder that an entry of this folder is in."""
        return self.cursors[self.layers.index(entry.layer)].fd

    def enter(self, name: str, holders: list[int]) -> int | None:
        """Go into a folder; return how many of its holders it is made of at most, if a mark or a file ends it."""
        members, cut = [], None
        for number, holder in enumerate(holders):
            if number and self.kind(name, holder) != "folder":
                cut = number
                break
            self.cursors[holder].down(name)
            members.append(holder)
            if extended(self.cursors[holder].fd, OPAQUE) == b"y":
                cut = number + 1
                break
        self._members.append(members)
        self.prefix += f"{name}/"
        return cut

    def leave(self) -> None:
        """Go back to the folder above; from the uppermost there is nowhere to go."""
        members = self._members.pop()
        if self._members:
            self.prefix = self.prefix[: self.prefix.rfind("/", 0, -1) + 1]
            for member in members:
                self.cursors[member].up()

    def _whiteout_by_attribute(self, name: str, holder: int) -> bool:
        return extended(f"/proc/self/fd/{self.cursors[holder].fd}/{name}", _WHITEOUT) is not None


def kind_of(found: os.stat_result) -> Kind:
    """Name what a description stands for."""
    mode = found.st_mode
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    if stat.S_ISLNK(mode):
        return "link"
    return "whiteout" if stat.S_ISCHR(mode) and found.st_rdev == 0 else "other"
