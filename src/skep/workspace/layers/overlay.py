"""Read a stack of folders as the kernel's overlay would show it, without mounting anything.

A whiteout, a character device 0:0 or an empty file with the attribute `user.overlay.whiteout`, hides what lies below
it. A folder with the attribute `user.overlay.opaque` = `y` hides what lies below in it; any other folder is joined with
those of the same path below it, as far as the first that is not a folder. (`x` only tells the kernel where to look for
whiteouts by attribute when it lists.)

Stacks are lists of folders on the host, uppermost first. Nothing in them is trusted: see `Cursor`. A name may be any
bytes (`os.fsdecode`). Reading raises OSError, with ESTALE when folders were moved under it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from skep.workspace.layers.comparison import Change, Comparison
from skep.workspace.layers.cursor import Cursor
from skep.workspace.layers.sight import OPAQUE, Entry, Kind, Sight

__all__ = ["Change", "Entry", "Kind", "Walk", "changes", "cover", "merged", "opened", "pierce"]

#: The kernel looks for whiteouts only in folders that it joins, and in those that carry this: they once were joined.
_ORIGIN = "user.overlay.origin"


def merged(layers: Sequence[str], *, over: Sequence[str] | None = None) -> Iterator[Entry]:
    """Yield what a stack shows, each folder before what is in it, and names in order.

    Marks come along as far as they are needed above `over`, the stack below this one: by default all that could be
    needed above any, and with `()` none. The uppermost folder itself is not among the entries.
    """
    with Walk(layers, over=over) as walk:
        yield from walk


def changes(newer: Sequence[str], older: Sequence[str]) -> Iterator[Change]:
    """Yield what differs between what two whole stacks show, in the order of `merged`.

    Contents, kinds, modes and targets of links count; times do not, nor does the uppermost folder itself. Folders that
    both stacks have from the same layers are not looked into, so the cost follows the layers that are not shared.
    """
    with closing(Sight(older)) as before, closing(Sight(newer)) as after:
        yield from Comparison(before, after)


def opened(entry: Entry) -> int:
    """Open the file of an entry for reading: no link on the way is followed, and its path may be of any length."""
    cursor = Cursor(entry.layer)
    try:
        *folders, name = entry.path.split("/")
        for folder in folders:
            cursor.down(folder)
        return cursor.open(name)
    finally:
        cursor.close()


def pierce(folder: int, name: str) -> None:
    """Put a whiteout into an open folder."""
    os.mknod(name, stat.S_IFCHR, 0, dir_fd=folder)
    # Else a listing of a folder that no other layer has a part in would show the name of the whiteout.
    os.setxattr(folder, _ORIGIN, b"")


def cover(folder: int) -> None:
    """Make an open folder opaque."""
    os.setxattr(folder, OPAQUE, b"y")


class Walk:
    """Goes through what a stack shows, as `merged` tells it, and opens what it has come to."""

    def __init__(self, layers: Sequence[str], *, over: Sequence[str] | None = None) -> None:
        self._sight = Sight([*layers, *(over or ())])
        self._count = len(layers)
        self._known = over is not None
        self._last = 0

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *_: object) -> None:
        self._sight.close()

    def __iter__(self) -> Iterator[Entry]:
        frames = [_Frame(self._sight.listing(), hidden=False)]
        while frames:
            frame = frames[-1]
            if not frame.names:
                frames.pop()
                self._sight.leave()
                continue
            name = frame.names.pop()
            holders = frame.listing.pop(name)
            if holders[0] < self._count and (found := self._sight.find(name, holders[0])) is not None:
                self._last = holders[0]
                if found.kind != "folder":
                    if found.kind != "whiteout" or self._pierces(frame, name, holders):
                        yield found
                    continue
                cut = self._sight.enter(name, holders)
                frames.append(_Frame(self._sight.listing(), hidden=frame.hidden or cut is not None))
                yield replace(found, opaque=True) if self._covers(frame, name, holders, cut) else found

    def folder(self) -> int:
        """Return the open folder that holds the entry come to last; a folder itself for one, the top before any."""
        return self._sight.cursors[self._last].fd

    def open(self, entry: Entry) -> int:
        """Open the file come to last for reading."""
        return self._sight.cursors[self._last].open(entry.path.rpartition("/")[2])

    def _pierces(self, frame: _Frame, name: str, holders: list[int]) -> bool:
        """Tell whether a whiteout is needed: something below would show without it."""
        if not self._known:
            return not frame.hidden
        below = self._below(holders)
        return below is not None and self._sight.kind(name, below) != "whiteout"

    def _covers(self, frame: _Frame, name: str, holders: list[int], cut: int | None) -> bool:
        """Tell whether a folder must be opaque: one below would be joined with it otherwise."""
        if cut is None:
            return False
        if not self._known:
            return not frame.hidden
        below = self._below(holders)
        # What lies below does its own stopping: only a stop within this stack needs a mark.
        return below is not None and below in holders[cut:] and self._sight.kind(name, below) == "folder"

    def _below(self, holders: list[int]) -> int | None:
        return next((holder for holder in holders if holder >= self._count), None)


class _Frame:
    """A folder on the way down: who holds which name, and which names are still to come, the next one last."""

    __slots__ = ("hidden", "listing", "names")

    def __init__(self, listing: dict[str, list[int]], *, hidden: bool) -> None:
        self.listing = listing
        self.names = sorted(listing, reverse=True)
        self.hidden = hidden
