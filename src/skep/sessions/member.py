"""One entry of an archive, and the rules that every archive has to keep.

What an archive says of itself is not believed: entries, bytes and folders are counted as they are met, and whatever
would not mean the same to every program that unpacks it is refused.
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from skep.errors import InvalidRequest
from skep.sessions.filenames import shown

_PART_BYTES = 255
_PATH_BYTES = 1024
_DEPTH = 32
_DRIVE = re.compile(r"[A-Za-z]:")


class NotUnpacked(InvalidRequest):
    """The archive is left packed; the message says why."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much an archive may become.

    Past `slack_bytes` it may grow `ratio`-fold at most. `entries` counts files and folders, those too that are only
    part of a path.
    """

    entries: int = 10_000
    unpacked_bytes: int = 512 << 20
    ratio: int = 100
    slack_bytes: int = 16 << 20
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Member:
    """A file or a folder of an archive. Its bytes are gone once the next one is asked for."""

    name: str
    folder: bool
    executable: bool
    pieces: Iterator[bytes]


class Reader(Protocol):
    """Yield what is in an archive, telling the meter what is unpacked."""

    def __call__(self, file: BinaryIO, meter: Meter) -> Iterator[Member]: ...


@dataclass(slots=True)
class Meter:
    """Count what comes out of one archive, and stop it in time."""

    room: Room
    packed_bytes: int
    unpacked_bytes: int = 0
    entries: int = 0
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.room.seconds

    def entry(self) -> None:
        self.entries += 1
        if self.entries > self.room.entries:
            raise NotUnpacked(f"it has more than {self.room.entries} entries")

    def unpacked(self, count: int) -> None:
        self.unpacked_bytes += count
        if self.unpacked_bytes > self.room.unpacked_bytes:
            raise NotUnpacked(f"it unpacks to more than {self.room.unpacked_bytes} bytes")
        if self.unpacked_bytes > self.room.slack_bytes + self.room.ratio * self.packed_bytes:
            raise NotUnpacked(f"it grows more than {self.room.ratio}-fold")
        if time.monotonic() > self._until:
            raise NotUnpacked(f"it takes longer than {self.room.seconds:g} s")


@dataclass(slots=True)
class Roll:
    """The paths of one archive, each of which has to be the only one of its kind.

    Names that differ in case alone, or in how an accent is written, are one name on some systems: there the second
    file would replace the first.
    """

    room: Room
    #: Each path as it is compared, with how it is written and whether it is a folder.
    _paths: dict[str, tuple[str, bool]] = field(default_factory=dict)

    def enter(self, member: Member) -> str:
        """Return the path of a member below the archive's folder; empty for that folder itself."""
        parts = _parts(member.name)
        for depth in range(1, len(parts)):
            self._add("/".join(parts[:depth]), folder=True)
        path = "/".join(parts)
        if not member.folder and (not path or self._paths.get(_compared(path)) == (path, False)):
            raise NotUnpacked(f"an entry has no name, or that of another: {shown(member.name)}")
        if path:
            self._add(path, folder=member.folder)
        return path

    def _add(self, path: str, *, folder: bool) -> None:
        known = self._paths.setdefault(_compared(path), (path, folder))
        if len(self._paths) > self.room.entries:
            raise NotUnpacked(f"it has more than {self.room.entries} entries")
        if known[0] != path:
            raise NotUnpacked(f"two entries differ in case or accents alone: {shown(known[0])} and {shown(path)}")
        if known[1] != folder:
            raise NotUnpacked(f"an entry is a file and a folder: {shown(path)}")


def _compared(path: str) -> str:
    return unicodedata.normalize("NFKC", path).casefold()


def _parts(name: str) -> list[str]:
    """Split the name of an entry, refusing what leads elsewhere or cannot be written or read."""
    if "\0" in name:
        raise NotUnpacked(f"an entry has a NUL in its name: {shown(name)}")
    # Some programs write backslashes as separators, and some read them so.
    plain = name.replace("\\", "/")
    if plain.startswith("/") or _DRIVE.match(plain):
        raise NotUnpacked(f"an entry has an absolute path: {shown(name)}")
    parts = [part for part in plain.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise NotUnpacked(f"an entry leads out of its folder: {shown(name)}")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError as error:
        raise NotUnpacked(f"the name of an entry is not text: {shown(name)}") from error
    if sum(sizes) > _PATH_BYTES or len(parts) > _DEPTH or max(sizes, default=0) > _PART_BYTES:
        raise NotUnpacked(f"an entry has a path that is too long or too deep: {shown(name)}")
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in plain):
        raise NotUnpacked(f"an entry has control characters in its name: {shown(name)}")
    return parts
