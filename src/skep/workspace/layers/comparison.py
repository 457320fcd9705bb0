"""Tell two stacks of layers apart by what they show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from skep.workspace.layers.cursor import open_at
from skep.workspace.layers.sight import Entry, Sight

_BLOCK = 1 << 20

Verb = Literal["added", "changed", "removed"]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two stacks. A file that became a folder has changed; what is in it is added."""

    path: str
    verb: Verb
    before: Entry | None
    after: Entry | None


class Comparison:
    """Goes through two stacks at once, and only where they are made of different layers."""

    def __init__(self, before: Sight, after: Sight) -> None:
        self._sides = (before, after)

    def __iter__(self) -> Iterator[Change]:
        pairs = [_Pair([side.listing() for side in self._sides])]
        while pairs:
            pair = pairs[-1]
            if not pair.names:
                self._leave(pairs.pop())
                continue
            name = pair.names.pop()
            holders = [listing.pop(name, []) if listing is not None else [] for listing in pair.listings]
            before, after = self._found(name, holders)
            change = self._compare(name, before, after)
            listings = self._enter(name, holders, (before, after))
            if listings != [None, None]:
                pairs.append(_Pair(listings))
            if change is not None:
                yield change

    def _found(self, name: str, holders: list[list[int]]) -> list[Entry | None]:
        """Describe what a name shows on either side."""
        entries = []
        for side, held in zip(self._sides, holders, strict=True):
            entry = side.find(name, held[0]) if held else None
            entries.append(None if entry is None or entry.kind == "whiteout" else entry)
        return entries

    def _compare(self, name: str, before: Entry | None, after: Entry | None) -> Change | None:
        if after is None:
            return None if before is None else Change(before.path, "removed", before, None)
        if before is None:
            return Change(after.path, "added", None, after)
        return None if self._alike(name, before, after) else Change(after.path, "changed", before, after)

    def _alike(self, name: str, before: Entry, after: Entry) -> bool:
        one, other = before.stat, after.stat
        if one.st_mode != other.st_mode:
            return False
        if before.kind == "folder" or (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino):
            return True
        if (one.st_size, one.st_rdev) != (other.st_size, other.st_rdev):
            return False
        folders = [side.folder(entry) for side, entry in zip(self._sides, (before, after), strict=True)]
        if before.kind == "link":
            return os.readlink(name, dir_fd=folders[0]) == os.readlink(name, dir_fd=folders[1])
        return before.kind != "file" or _same_bytes(name, folders[0], folders[1])

    def _enter(
        self, name: str, holders: list[list[int]], entries: tuple[Entry | None, Entry | None]
    ) -> list[Listing | None]:
        """Go into what is a folder on either side, unless both have it from the same layers."""
        listings: list[Listing | None] = [None, None]
        if self._from_same(holders):
            return listings
        for number, entry in enumerate(entries):
            if entry is not None and entry.kind == "folder":
                self._sides[number].enter(name, holders[number])
                listings[number] = self._sides[number].listing()
        return listings

    def _from_same(self, holders: list[list[int]]) -> bool:
        before, after = (
            [side.layers[holder] for holder in held] for side, held in zip(self._sides, holders, strict=True)
        )
        return before == after

    def _leave(self, pair: _Pair) -> None:
        for side, listing in zip(self._sides, pair.listings, strict=True):
            if listing is not None:
                side.leave()


Listing = dict[str, list[int]]


class _Pair:
    """A path on the way down: who holds which name on either side, if that side has a folder there."""

    __slots__ = ("listings", "names")

    def __init__(self, listings: list[Listing | None]) -> None:
        self.listings = listings
        self.names = sorted({name for listing in listings for name in listing or ()}, reverse=True)


def _same_bytes(name: str, one: int, other: int) -> bool:
    with open(open_at(one, name), "rb") as left, open(open_at(other, name), "rb") as right:
        while True:
            block = left.read(_BLOCK)
            if block != right.read(_BLOCK):
                return False
            if not block:
                return True
