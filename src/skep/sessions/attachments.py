"""Files sent with a prompt: written under attachments/, archives unpacked beside themselves.

Nothing that is sent is trusted: names are made safe, sizes are counted while bytes come in, and each file is whole on
this side before anything of it is written. Nothing that is in the sandbox is trusted either: what is there already is
never written over, and a link in the place of the folder is set aside.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from skep.errors import Denied, InvalidRequest, LimitReached, NotFound
from skep.sandbox.files import Files
from skep.sessions.filenames import numbered, safe_name, shown, split_suffix
from skep.sessions.sniff import HEAD_BYTES, media_type
from skep.sessions.unpacking import Room, Unpacked, is_archive, unpack
from skep.workspace.faults import in_thread

FOLDER = "attachments"
_IN_MEMORY_BYTES = 4 << 20
_PIECE = 1 << 20
_NUMBERS = 50
_TOLD = 30


@dataclass(frozen=True, slots=True)
class Sent:
    """A file that somebody sends, by the name they give it."""

    name: str
    data: bytes | AsyncIterable[bytes]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may come with one prompt, and what an archive among it may become."""

    files: int = 20
    file_bytes: int = 100 << 20
    total_bytes: int = 250 << 20
    room: Room = field(default_factory=Room)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A file that is there now; `path` is below /workspace. `left_packed` says why an archive was not unpacked."""

    path: str
    size: int
    sha256: str
    media_type: str
    unpacked: Unpacked | None = None
    left_packed: str = ""

    def text(self) -> str:
        told = f"{self.path} ({self.media_type}, {_size(self.size)})"
        if self.unpacked:
            inside = f"{self.unpacked.files} files, {_size(self.unpacked.size)}"
            return f"{told}, unpacked in {self.unpacked.folder}/ ({inside}; archives in it are left packed)"
        return f"{told}, not unpacked: {self.left_packed}" if self.left_packed else told


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that was not taken. The name is the sender's own, and may hold anything: show it with `text`."""

    name: str
    reason: str

    def text(self) -> str:
        return f"{shown(self.name)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """What became of all that was sent. `set_aside` is where something went that stood in the folder's place."""

    arrived: tuple[Arrived, ...] = ()
    refused: tuple[Refused, ...] = ()
    set_aside: str | None = None

    def text(self) -> str:
        """Return what the agent is told; no name in it can break out of its line."""
        lines = _told("Files that were sent with this prompt:", self.arrived)
        lines += _told("Files that were sent and refused:", self.refused)
        if self.set_aside:
            lines.append(f"What was at {FOLDER} and is no folder is now at {self.set_aside}.")
        return "\n".join(lines)


async def receive(files: Files, sent: Sequence[Sent], *, bounds: Bounds | None = None) -> Arrival:
    """Write what was sent, and say what arrived and what did not.

    A file that cannot be taken is refused by itself. A sandbox that is lost, or a sender that fails, ends it all; what
    was written by then stays.
    """
    if not sent:
        return Arrival()
    desk = _Desk(files, bounds or Bounds(), await _make_room(files))
    for one in sent[: desk.bounds.files]:
        await desk.take(one)
    desk.refused += [Refused(one.name, "too many files were sent") for one in sent[desk.bounds.files :]]
    return Arrival(tuple(desk.arrived), tuple(desk.refused), desk.set_aside)


@dataclass(slots=True)
class _Desk:
    files: Files
    bounds: Bounds
    set_aside: str | None
    arrived: list[Arrived] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    _bytes: int = 0

    async def take(self, sent: Sent) -> None:
        with SpooledTemporaryFile(_IN_MEMORY_BYTES) as spool:
            file = cast(BinaryIO, spool)
            try:
                self.arrived.append(await self._taken(sent, file))
            except (LimitReached, Denied, InvalidRequest) as error:
                self.refused.append(Refused(sent.name, error.message))

    async def _taken(self, sent: Sent, file: BinaryIO) -> Arrived:
        size, digest = await self._spooled(sent, file)
        file.seek(0)
        kind = media_type(file.read(HEAD_BYTES))
        path = f"{FOLDER}/{await _free(self.files, safe_name(sent.name))}"
        await self.files.write(path, _stream(file), mode=0o644)
        self._bytes += size
        unpacked, why = await self._unpacked(path, file) if await is_archive(file) else (None, "")
        return Arrived(path, size, digest, kind, unpacked, why)

    async def _spooled(self, sent: Sent, file: BinaryIO) -> tuple[int, str]:
        """Bring all bytes here, unless they are too many."""
        size, digest = 0, sha256()
        async for piece in _pieces(sent.data):
            size += len(piece)
            if size > self.bounds.file_bytes:
                raise LimitReached(f"it has more than {_size(self.bounds.file_bytes)}")
            if self._bytes + size > self.bounds.total_bytes:
                raise LimitReached(f"all files together have more than {_size(self.bounds.total_bytes)}")
            await in_thread(_kept(file, digest.update), piece)
        return size, digest.hexdigest()

    async def _unpacked(self, path: str, file: BinaryIO) -> tuple[Unpacked | None, str]:
        name = path.rpartition("/")[2]
        stem, suffix = split_suffix(name)
        folder = f"{FOLDER}/{await _free(self.files, stem if suffix else f'{name}-unpacked')}"
        try:
            return await unpack(self.files, file, folder, room=self.bounds.room), ""
        except (LimitReached, Denied, InvalidRequest) as error:
            return None, error.message


async def _make_room(files: Files) -> str | None:
    """Make the folder; what stands in its place, a link for one, is set aside and not followed."""
    aside = None
    try:
        there = await files.stat(FOLDER)
    except NotFound:
        there = None
    if there is not None and there.kind != "folder":
        aside = f"{FOLDER}.aside-{secrets.token_hex(4)}"
        await files.move(FOLDER, aside)
    await files.mkdir(FOLDER)
    return aside


async def _free(files: Files, name: str) -> str:
    """Return a name that nothing has yet, close to the given one."""
    for candidate in (name, *(numbered(name, number) for number in range(2, _NUMBERS))):
        if not await _taken(files, candidate):
            return candidate
    return numbered(name, secrets.token_hex(8))


async def _taken(files: Files, name: str) -> bool:
    try:
        await files.stat(f"{FOLDER}/{name}")
    except NotFound:
        return False
    return True


async def _pieces(data: bytes | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    async for piece in data:
        yield piece


async def _stream(file: BinaryIO) -> AsyncIterator[bytes]:
    file.seek(0)
    while piece := await in_thread(file.read, _PIECE):
        yield piece


def _kept(file: BinaryIO, hashed: Callable[[bytes], None]) -> Callable[[bytes], None]:
    def keep(piece: bytes) -> None:
        hashed(piece)
        file.write(piece)

    return keep


def _told(title: str, items: Sequence[Arrived] | Sequence[Refused]) -> list[str]:
    if not items:
        return []
    lines = [f"- {item.text()}" for item in items[:_TOLD]]
    more = [f"- and {len(items) - _TOLD} more"] if len(items) > _TOLD else []
    return [title, *lines, *more]


def _size(count: float) -> str:
    if count < 1000:
        return f"{count:.0f} byte{'' if count == 1 else 's'}"
    for unit in ("kB", "MB"):
        count /= 1000
        if count < 1000:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:.3g} GB"
