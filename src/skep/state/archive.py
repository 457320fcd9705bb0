"""The file a backup is kept in: the same for both databases, so that either restores into the other.

It is a ZIP archive. Each table is a member `<table>.jsonl` with one JSON array per row, in the order of the
primary key; bytes are {"base64": "…"}. The member `manifest.json` names the schema revision and, for each
table, its columns, the number of its rows and the SHA-256 of its member.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skep.errors import Conflict, Corrupt, DatabaseTooNew, InvalidRequest
from skep.state.failures import reachable
from skep.state.revision import HEAD, REVISIONS

MANIFEST = "manifest.json"
FORMAT: Final = "skep-backup"
VERSION: Final = 1
MAX_MANIFEST_BYTES = 1024 * 1024
# The log takes bodies of a mebibyte; quoting them twice makes them a few times longer.
MAX_LINE_BYTES = 16 * 1024 * 1024

Progress = Callable[[int, int], None]
"""Called with the number of rows done and the number there are to do."""

Rows = Sequence[Sequence[Any]]

_Name = Annotated[str, Field(pattern=r"^[a-z][a-z_]{0,62}$")]


class Member(BaseModel):
    """What the manifest says of one table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: _Name
    columns: tuple[_Name, ...]
    rows: int = Field(ge=0)
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.table}.jsonl"


class Manifest(BaseModel):
    """What a backup holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["skep-backup"] = FORMAT
    version: Literal[1] = VERSION
    revision: str
    created_at: str
    tables: tuple[Member, ...]

    @property
    def rows(self) -> int:
        return sum(member.rows for member in self.tables)


class Meter:
    """Tells somebody who waits how far the work is, every hundred rows or so and at the end."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total = total
        self._progress = progress
        self._done = self._told = 0

    def add(self, rows: int) -> None:
        self._done += rows
        if self._done - self._told >= 100 or self._done == self._total:
            self._told = self._done
            self._progress(self._done, self._total)


class Tally:
    """The number of a table's rows and the digest of their lines, as they pass by."""

    def __init__(self) -> None:
        self.rows = 0
        self._digest = sha256()

    def add(self, lines: bytes, *, rows: int = 1) -> None:
        self.rows += rows
        self._digest.update(lines)

    def member(self, table: str, columns: Sequence[str]) -> Member:
        return Member(table=table, columns=tuple(columns), rows=self.rows, sha256=self._digest.hexdigest())


class ArchiveWriter:
    """An archive being written, one table after the other."""

    def __init__(self, file: zipfile.ZipFile) -> None:
        self._file = file
        self._members: list[Member] = []

    @contextmanager
    def table(self, name: str, columns: Sequence[str]) -> Iterator[Callable[[Rows], None]]:
        """Give a function that takes the rows of a table, some at a time."""
        tally = Tally()
        with self._file.open(f"{name}.jsonl", "w", force_zip64=True) as member:

            def write(rows: Rows) -> None:
                lines = encode(rows)
                tally.add(lines, rows=len(rows))
                member.write(lines)

            yield write
        self._members.append(tally.member(name, columns))

    def finish(self, *, revision: str, created_at: str) -> Manifest:
        manifest = Manifest(revision=revision, created_at=created_at, tables=tuple(self._members))
        self._file.writestr(MANIFEST, manifest.model_dump_json(indent=1))
        return manifest


@contextmanager
def write_archive(path: Path) -> Iterator[ArchiveWriter]:
    """Write an archive that appears under its name only when it is whole and on the disk."""
    with reachable(path):
        if path.exists():
            raise Conflict(f"{path} exists already", hint="choose another name, or remove the file first")
        handle, name = tempfile.mkstemp(prefix=".skep-backup-", dir=path.parent)
        draft = Path(name)
        try:
            with open(handle, "wb") as raw:
                with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as file:
                    yield ArchiveWriter(file)
                raw.flush()
                os.fsync(raw.fileno())
            draft.rename(path)
            _sync_folder(path.parent)
        finally:
            draft.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Archive:
    """A backup to read. What it says is not believed before `verify`."""

    def __init__(self, path: Path, file: zipfile.ZipFile, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._file = file

    def verify(self, meter: Meter) -> None:
        """Read every row and compare with the manifest; raise Corrupt naming the first table that differs."""
        listed = sorted([MANIFEST, *(member.file for member in self.manifest.tables)])
        if sorted(self._file.namelist()) != listed:
            raise _damaged(self.path, "its tables are not those of its manifest")
        for member in self.manifest.tables:
            tally = Tally()
            for line in self._lines(member):
                self._row(member, line)
                tally.add(line)
                meter.add(1)
            if tally.member(member.table, member.columns) != member:
                raise _damaged(self.path, f"{member.table} does not match its checksum")

    def rows(self, member: Member) -> Iterator[list[Any]]:
        """Read the rows of a table."""
        return (self._row(member, line) for line in self._lines(member))

    def _lines(self, member: Member) -> Iterator[bytes]:
        with self._faults(member), self._file.open(member.file) as file:
            while line := file.readline(MAX_LINE_BYTES):
                yield line

    def _row(self, member: Member, line: bytes) -> list[Any]:
        if not line.endswith(b"\n"):
            raise _damaged(self.path, f"a row of {member.table} is cut or too long")
        with self._faults(member):
            row = _DECODER.decode(line.decode())
            if isinstance(row, list) and len(row) == len(member.columns):
                return [_value(value) for value in row]
        raise _damaged(self.path, f"a row of {member.table} has not the columns of its table")

    @contextmanager
    def _faults(self, member: Member) -> Iterator[None]:
        try:
            yield
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, RecursionError) as error:
            raise _damaged(self.path, f"{member.table} cannot be read") from error


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open a backup and read its manifest; refuse what is damaged, newer, or no backup at all."""
    with reachable(path), closing(_open_zip(path)) as file:
        yield Archive(path, file, _read_manifest(path, file))


def _open_zip(path: Path) -> zipfile.ZipFile:
    with path.open("rb") as raw:
        start = raw.read(2)
    if start != b"PK":
        raise _foreign(path)
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise _damaged(path, "it is cut short or overwritten") from error


def _read_manifest(path: Path, file: zipfile.ZipFile) -> Manifest:
    if MANIFEST not in file.namelist():
        raise _foreign(path)
    try:
        with file.open(MANIFEST) as member:
            stated = json.loads(member.read(MAX_MANIFEST_BYTES))
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RecursionError) as error:
        raise _damaged(path, "its manifest cannot be read") from error
    if not isinstance(stated, dict) or stated.get("format") != FORMAT:
        raise _foreign(path)
    if stated.get("version") != VERSION or stated.get("revision") not in REVISIONS:
        raise DatabaseTooNew(
            f"{path} was written by a newer Skep, this one knows schemas up to {HEAD!r}",
            hint="install a newer Skep; nothing was changed",
        )
    try:
        return Manifest.model_validate(stated)
    except ValidationError as error:
        raise _damaged(path, "its manifest is not in order") from error


def encode(rows: Rows) -> bytes:
    """Return rows as they stand in an archive."""
    return b"".join(
        json.dumps(list(row), ensure_ascii=False, separators=(",", ":"), default=_bytes).encode() + b"\n"
        for row in rows
    )


def _bytes(value: object) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"a {type(value).__name__} has no place in a backup")
    return {"base64": b64encode(value).decode()}


def _value(value: Any) -> Any:
    match value:
        case None | str() | int() | float():
            return value
        case {"base64": str() as text} if len(value) == 1:
            return b64decode(text, validate=True)
    raise ValueError("neither text, a number nor bytes")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _foreign(path: Path) -> InvalidRequest:
    return InvalidRequest(f"{path} is not a backup of Skep's", hint="name a file made by: skep state backup")


def _damaged(path: Path, how: str) -> Corrupt:
    return Corrupt(f"the backup {path} is damaged: {how}", hint="use another copy; nothing was changed")
