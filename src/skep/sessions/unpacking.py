"""Unpack an archive that somebody sent into a folder of a sandbox.

The archive is read twice, in a thread: once to see that all of it keeps the rules, once to write it. So nothing of an
archive that is refused is ever written. It is read from the bytes that arrived, never from the copy in the sandbox,
which an agent can change in between. The folder gets its name when everything is in it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from skep.errors import SkepError
from skep.sandbox.files import Files
from skep.sessions.member import Member, Meter, NotUnpacked, Reader, Roll, Room
from skep.sessions.packing import PACKINGS, Packing
from skep.sessions.sniff import HEAD_BYTES, media_type
from skep.sessions.tars import holds_tar, read_tar
from skep.sessions.zips import read_zip
from skep.workspace.faults import in_thread

__all__ = ["NotUnpacked", "Room", "Unpacked", "is_archive", "unpack"]

#: Files up to this size are written in one call.
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A folder with what was in an archive."""

    folder: str
    files: int
    size: int


async def is_archive(file: BinaryIO) -> bool:
    """Say whether a file is an archive of a kind that is unpacked, by its content."""
    return await in_thread(_reader, file) is not None


async def unpack(files: Files, file: BinaryIO, folder: str, *, room: Room) -> Unpacked:
    """Unpack an archive into a new folder, or raise `NotUnpacked` and leave no trace of it."""
    surveyed = await in_thread(_survey, file, room)
    above, _, _ = folder.rpartition("/")
    draft = f"{above or '.'}/.skep-{secrets.token_hex(8)}"
    await files.mkdir(draft)
    try:
        await _write(files, file, draft, room=room)
        await files.move(draft, folder)
    except BaseException:
        await asyncio.shield(_discard(files, draft))
        raise
    return Unpacked(folder, surveyed.files, surveyed.size)


@dataclass(slots=True)
class _Survey:
    files: int = 0
    size: int = 0


def _reader(file: BinaryIO) -> Reader | None:
    """Choose who can read a file, by its content."""
    file.seek(0)
    kind = media_type(file.read(HEAD_BYTES))
    if kind == "application/zip":
        return read_zip
    packing = PACKINGS.get(kind)
    if packing is None or not holds_tar(file, packing, Meter(Room(), packed_bytes=0)):
        return None
    return partial(_read_tar, packing)


def _read_tar(packing: Packing, file: BinaryIO, meter: Meter) -> Iterator[Member]:
    return read_tar(file, packing, meter)


def _members(file: BinaryIO, room: Room) -> Iterator[tuple[str, Member]]:
    reader = _reader(file)
    if reader is None:
        raise NotUnpacked("it is not an archive that is known here")
    roll = Roll(room)
    for member in reader(file, Meter(room, packed_bytes=file.seek(0, 2))):
        path = roll.enter(member)
        if path:
            yield path, member


def _survey(file: BinaryIO, room: Room) -> _Survey:
    """Read all of an archive, writing nothing."""
    found = _Survey()
    for _, member in _members(file, room):
        found.files += not member.folder
        found.size += sum(map(len, member.pieces))
    return found


async def _write(files: Files, file: BinaryIO, folder: str, *, room: Room) -> None:
    members = _members(file, room)
    while (found := await in_thread(_begun, members)) is not None:
        path, member, begin, more = found
        if member.folder:
            await files.mkdir(f"{folder}/{path}")
            continue
        mode = 0o755 if member.executable else 0o644
        await files.write(f"{folder}/{path}", _stream(begin, member) if more else begin, mode=mode)


def _begun(members: Iterator[tuple[str, Member]]) -> tuple[str, Member, bytes, bool] | None:
    """Return the next member with its beginning, and whether there may be more of it."""
    found = next(members, None)
    if found is None:
        return None
    path, member = found
    begin = bytearray()
    for piece in member.pieces:
        begin += piece
        if len(begin) >= _SMALL_BYTES:
            return path, member, bytes(begin), True
    return path, member, bytes(begin), False


async def _stream(begin: bytes, member: Member) -> AsyncIterator[bytes]:
    yield begin
    while (piece := await in_thread(next, member.pieces, None)) is not None:
        yield piece


async def _discard(files: Files, draft: str) -> None:
    # Why it failed matters more than that its remains cannot be reached.
    with suppress(SkepError):
        await files.remove(draft, recursive=True)
