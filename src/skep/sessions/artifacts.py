"""What an agent wants its user to get: the files in output/display that have changed, put on the shelf.

All there is the agent's doing: names, types, sizes, and what a path leads to. Only regular files are taken; what a
file is gets told by its bytes; a file that changes while it is read is kept as it was read, under the hash of that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from skep.errors import Denied, InvalidRequest, LimitReached, NotFound, StorageFull
from skep.sandbox.files import Entry, Files
from skep.sessions.filenames import numbered, safe_name, shown
from skep.sessions.previews import ImagePreview, Preview, preview
from skep.sessions.shelf import Draft, Shelf
from skep.sessions.sniff import media_type
from skep.sessions.thumbnails import FORMATS, thumbnail

FOLDER = "output/display"
_NAMED = 100


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is collected at once. `entries` and `read_bytes` bound the looking, changed or not."""

    files: int = 100
    file_bytes: int = 100 << 20
    total_bytes: int = 500 << 20
    entries: int = 10_000
    depth: int = 16
    read_bytes: int = 2 << 30
    thumbnails: int = 20
    image_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file for the user. `path` is where the agent has it, as it is written; `name` is safe to deliver."""

    path: str
    name: str
    media_type: str
    size: int
    sha256: str
    preview: Preview | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was not delivered; the path is in quotes and prints on one line."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """What was found. `hashes` is the `known` of the next time; `unnamed` counts what `skipped` has no room for."""

    artifacts: tuple[Artifact, ...]
    skipped: tuple[Skipped, ...]
    hashes: Mapping[str, str]
    unnamed: int = 0


async def collect(files: Files, *, known: Mapping[str, str], shelf: Shelf, bounds: Bounds | None = None) -> Collected:
    """Put every file on the shelf that is new or has changed since `known` (its path and hash)."""
    round_ = _Round(files, dict(known), shelf, bounds or Bounds())
    async for path, entry in round_.walk():
        await round_.take(path, entry)
    return round_.collected()


@dataclass(slots=True)
class _Round:
    files: Files
    known: dict[str, str]
    shelf: Shelf
    bounds: Bounds
    artifacts: list[Artifact] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    unnamed: int = 0
    whole: bool = True
    read_bytes: int = 0
    total_bytes: int = 0
    thumbnails: int = 0

    def collected(self) -> Collected:
        hashes = self.hashes if self.whole else self.known | self.hashes
        return Collected(tuple(self.artifacts), tuple(self.skipped), hashes, self.unnamed)

    def skip(self, path: str, reason: str) -> None:
        if len(self.skipped) < _NAMED:
            self.skipped.append(Skipped(shown(path, 200), reason))
        else:
            self.unnamed += 1

    async def walk(self) -> AsyncIterator[tuple[str, Entry]]:
        """Yield the regular files, folder by folder; links are named and not followed."""
        folders, seen = [FOLDER] if await self._begins() else [], 0
        while folders:
            folder = folders.pop()
            below: list[str] = []
            for entry in await self._entries(folder):
                path, seen = f"{folder}/{entry.name}", seen + 1
                if seen > self.bounds.entries:
                    self._stop(folder, f"more than {self.bounds.entries} files and folders are there")
                    return
                if entry.kind == "folder":
                    below.append(path)
                elif entry.kind == "file":
                    yield path, entry
                else:
                    self.skip(path, "it is a link" if entry.kind == "link" else "it is no regular file")
            folders += reversed(below)

    async def take(self, path: str, entry: Entry) -> None:
        """Put one file on the shelf, unless it is known or too much."""
        try:
            path.encode()
            self._check(entry)
            async with self.shelf.draft() as draft:
                await self._read(path, draft)
                await self._judge(path, draft)
        except NotFound:
            return  # removed in the meantime
        except UnicodeEncodeError:
            self.skip(path, "its name is not text")
        except StorageFull:
            raise  # the disk of this machine, not the agent's
        except (Denied, InvalidRequest, LimitReached) as error:
            self._keep_known(path)
            self.skip(path, error.message)

    async def _begins(self) -> bool:
        """Say whether there is anything to walk: the way there must not be a link either."""
        for path in ("output", FOLDER):
            try:
                entry = await self.files.stat(path)
            except NotFound:
                return False
            if entry.kind != "folder":
                self.skip(path, "it is no folder")
                return False
        return True

    async def _entries(self, folder: str) -> list[Entry]:
        if folder.count("/") - FOLDER.count("/") >= self.bounds.depth:
            self._stop(folder, "it is too deep")
            return []
        try:
            return await self.files.list(folder)
        except NotFound:
            return []
        except (Denied, InvalidRequest, LimitReached) as error:
            self._stop(folder, error.message)
            return []

    def _check(self, entry: Entry) -> None:
        if entry.size > self.bounds.file_bytes:
            raise LimitReached(f"it has more than {self.bounds.file_bytes} bytes")
        if self.read_bytes + entry.size > self.bounds.read_bytes:
            raise LimitReached("too much is there to look at all of it")

    async def _read(self, path: str, draft: Draft) -> None:
        async for piece in self.files.stream(path):
            self.read_bytes += len(piece)
            if draft.size + len(piece) > self.bounds.file_bytes or self.read_bytes > self.bounds.read_bytes:
                raise LimitReached("it grows while it is read")
            await draft.add(piece)
        # A link may have taken the place of the file between the look at it and the opening.
        if (await self.files.stat(path)).kind != "file":
            raise Denied("it is a link")

    async def _judge(self, path: str, draft: Draft) -> None:
        if self.known.get(path) == draft.sha256:
            self.hashes[path] = draft.sha256
            return
        if len(self.artifacts) >= self.bounds.files:
            raise LimitReached(f"more than {self.bounds.files} files have changed")
        if self.total_bytes + draft.size > self.bounds.total_bytes:
            raise LimitReached(f"the changed files together have more than {self.bounds.total_bytes} bytes")
        self.total_bytes += draft.size
        digest, head = await draft.keep(), bytes(draft.head)
        kind = media_type(head)
        look = preview(kind, head, whole=draft.size == len(head)) or await self._picture(kind, digest, draft.size)
        self.hashes[path] = digest
        self.artifacts.append(Artifact(path, self._name(path), kind, draft.size, digest, look))

    async def _picture(self, kind: str, digest: str, size: int) -> ImagePreview | None:
        if kind not in FORMATS or size > self.bounds.image_bytes or self.thumbnails >= self.bounds.thumbnails:
            return None
        self.thumbnails += 1
        made = await thumbnail(self.shelf.get(digest), kind)
        return ImagePreview(await self.shelf.put(made.png), made.width, made.height) if made else None

    def _name(self, path: str) -> str:
        """Return a name to deliver the file by, other than those of this round."""
        name = wanted = safe_name(path.rpartition("/")[2])
        number = 2
        while name.casefold() in self.names:
            name, number = numbered(wanted, number), number + 1
        self.names.add(name.casefold())
        return name

    def _keep_known(self, path: str) -> None:
        if path in self.known:
            self.hashes[path] = self.known[path]

    def _stop(self, path: str, reason: str) -> None:
        """Remember that not everything was seen, so that what was not is not taken for removed."""
        self.whole = False
        self.skip(path, reason)
