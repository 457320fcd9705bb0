"""What an archive says about itself: an index, and rows that describe a tree.

The index is one object of the store, written last, so an archive is complete or not there. The rows are kept in chunks
of their own, a few thousand to each, with the names of the chunks that they speak of; where nothing has changed, those
chunks are shared with the archive before. Names are bytes: JSON has them as Latin-1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from skep.errors import ArchiveDamaged

Code = Literal["folder", "file", "link", "name", "whiteout", "pipe", "socket"]
ChunkId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
#: No file is larger; with holes an agent makes one of that size in a moment, where the file system takes it.
Count = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Place = Annotated[int, Field(ge=-1, le=(1 << 63) - 1)]
#: In nanoseconds; file systems keep seconds of 64 bits, and agents set what they like.
Moment = Annotated[int, Field(ge=-(1 << 63) * 10**9, le=(1 << 63) * 10**9)]


class Row(NamedTuple):
    """One thing in a tree, each folder before what is in it. The first row is the uppermost folder itself."""

    code: Code
    depth: Count
    name: str
    mode: Count
    mtime_ns: Moment
    size: Count = 0
    #: Of a file: chunk, offset and length in turns; the chunk is a number in the rows' own list, or -1 for a hole.
    extents: Sequence[Place] = ()
    #: Of a link: where it leads.
    target: str = ""
    #: Of a further name of a file: how many rows before this one its first name is.
    back: Count = 0
    opaque: bool = False
    #: Extended attributes, as Latin-1.
    attributes: dict[str, str] = {}  # noqa: RUF012 (never changed)


class Rows(BaseModel):
    """A run of rows, with the chunks that they speak of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunks: list[ChunkId]
    rows: list[Row]


class Tree(BaseModel):
    """A saved tree: where its rows are, which chunks it needs, and what it amounts to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: list[ChunkId]
    chunks: list[ChunkId]
    #: The numbers of the rows that later ones are further names of.
    named_again: list[Count]
    files: Count
    size_bytes: Count
    #: Devices and whatever else nobody can make anew.
    left_out: Count = 0


class SnapshotName(BaseModel):
    """The snapshot that a workspace stands on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str
    version: str
    hash: str


class Index(BaseModel):
    """The object that makes an archive one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1] = 1
    name: str
    version: str
    saved_at: datetime
    tree: Tree
    snapshot: SnapshotName | None = None
    meta: dict[str, Any] = {}


_ROWS = TypeAdapter(Rows)


def encode_rows(chunks: list[str], rows: list[Row]) -> bytes:
    return json.dumps({"chunks": chunks, "rows": rows}, separators=(",", ":")).encode()


def decode_rows(data: bytes, name: str) -> Rows:
    try:
        return _ROWS.validate_json(data)
    except ValidationError as error:
        raise _unreadable(name, error) from error


def decode_index(data: bytes, name: str) -> Index:
    try:
        return Index.model_validate(from_json(data))
    except (ValueError, ValidationError) as error:
        raise _unreadable(name, error) from error


def latin(name: str) -> str:
    """Write a name of any bytes as JSON can have it."""
    return name if name.isascii() else os.fsencode(name).decode("latin-1")


def unlatin(text: str) -> str:
    """Return the name that `latin` has written; UnicodeEncodeError for what it cannot have."""
    return text if text.isascii() else os.fsdecode(text.encode("latin-1"))


def _unreadable(name: str, error: ValueError) -> ArchiveDamaged:
    first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
    place = ".".join(str(part) for part in first["loc"])
    return ArchiveDamaged(f"{name} breaks its own rules: {place}: {first['msg']}", hint="restore an older version")
