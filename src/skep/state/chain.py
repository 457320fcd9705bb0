"""Verify a log: every record against its hash, its place and its copies, its end against what is signed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from pydantic_core import from_json
from sqlalchemy import ColumnElement, LargeBinary, Row, cast, func, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import Corrupt
from skep.state.checkpoint import Checkpoint, Signer, is_signed, key_id
from skep.state.database import Database
from skep.state.record import GENESIS, check_id
from skep.state.schema import checkpoints, event_heads, events

CHUNK = 5_000

_COPIES = (
    events.c.account_id,
    events.c.actor,
    events.c.at,
    events.c.hive_id,
    events.c.task_id,
    events.c.type,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """The first record of a hive that is not as it was written, and what is wrong with it."""

    hive_id: str
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verify found: `faults` holds the first fault of each hive that has one.

    `unanchored` counts the records after the newest checkpoint of their hive: the chain covers them, but a
    cut there shows only in the database's own note of where the log ends.
    """

    count: int
    hives: int
    unanchored: int
    faults: tuple[Fault, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def first_bad(self) -> Fault | None:
        return self.faults[0] if self.faults else None


@dataclass(slots=True)
class Claims:
    """What is said about a hive's log elsewhere: hashes at sequence numbers, and who says so."""

    hive_id: str
    said: dict[int, list[tuple[bytes, str]]] = field(default_factory=dict)
    anchored: int = 0
    strangers: int = 0

    def add(self, seq: int, hash_: bytes, who: str) -> None:
        self.said.setdefault(seq, []).append((hash_, who))

    def take(self, checkpoint: Checkpoint, public_key: bytes | None) -> Fault | None:
        """Believe a checkpoint that the key has signed; leave those of other keys aside."""
        if public_key is None or checkpoint.key_id != key_id(public_key):
            self.strangers += 1
            return None
        if checkpoint.hive_id != self.hive_id or not is_signed(checkpoint, public_key):
            return Fault(self.hive_id, checkpoint.seq, "the checkpoint here does not bear the key's signature")
        self.add(checkpoint.seq, checkpoint.hash, f"the checkpoint signed at {checkpoint.at}")
        self.anchored = max(self.anchored, checkpoint.seq)
        return None

    def dispute(self, seq: int, digest: bytes) -> Fault | None:
        for hash_, who in self.said.pop(seq):
            if hash_ != digest:
                return Fault(self.hive_id, seq, f"the records up to here are not those that {who} states")
        return None

    def unmet(self, last: int) -> Fault | None:
        """Name the cut when something is said about a record beyond the last."""
        beyond = max((seq for seq in self.said if seq > last), default=None)
        if beyond is None:
            return None
        return Fault(self.hive_id, last + 1, f"missing: {self.said[beyond][0][1]} covers records up to {beyond}")


class Walk:
    """Goes along the records of one hive in order, remembering only the last hash."""

    def __init__(self, claims: Claims) -> None:
        self.claims = claims
        self.seq = 0
        self.hash = GENESIS

    def past(self, rows: Iterable[Sequence[Any]]) -> Fault | None:
        """Check rows of (seq, hash, record, copies…), text as bytes; stop at the first fault.

        The stored bytes are hashed as they are: making them canonical again would cost ten times as much and
        prove nothing more, since whoever wrote the hash wrote these bytes.
        """
        said = self.claims.said
        for seq, hash_, record, *copies in rows:
            if seq != self.seq + 1:
                return self.fault(f"missing: the next record is number {seq!r}")
            digest = sha256(self.hash + record).digest()
            if digest != hash_:
                return self.fault(_why(record, seq))
            number, values = stated(record)
            if number != seq or values != copies:
                return self.fault(_differing(number, values, copies))
            self.seq, self.hash = seq, digest
            if seq in said and (fault := self.claims.dispute(seq, digest)):
                return fault
        return None

    @property
    def unanchored(self) -> int:
        return max(0, self.seq - self.claims.anchored)

    def fault(self, reason: str) -> Fault:
        return Fault(self.claims.hive_id, self.seq + 1, reason)


def stated(record: bytes) -> tuple[Any, list[bytes | None]]:
    """Return the number and the values, in the order of the copies, that a record states."""
    try:
        one = from_json(record)
        task = one["task"]
        return one["seq"], [
            one["account"].encode(),
            one["actor"].encode(),
            one["at"].encode(),
            one["hive"].encode(),
            task if task is None else task.encode(),
            one["type"].encode(),
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, []


def _why(record: bytes, seq: int) -> str:
    number, _ = stated(record)
    if number is None:
        return "the record is no longer readable and does not match its hash"
    if number != seq:
        return f"the record in this place says it is number {number!r}"
    return "the record and its hash do not match"


def _differing(number: Any, values: Sequence[bytes | None], copies: Sequence[bytes | None]) -> str:
    for column, kept, copy in zip(_COPIES, values, copies, strict=False):
        if kept != copy:
            return f"the column {column.name} says {_shown(copy)}, the record says {_shown(kept)}"
    return f"the record in this place says it is number {number!r}"


def _shown(value: bytes | None) -> str:
    return ascii(value.decode(errors="backslashreplace"))[:60] if value is not None else "nothing"


async def verify(
    database: Database,
    hive_id: str | None = None,
    *,
    signer: Signer | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Verify the log of one hive, or of all; `progress` hears how many records were checked since last time.

    Appends may go on meanwhile. Without a signer nothing signed is trusted, and the verdict says so.
    """
    hive_ids = [check_id("hive_id", hive_id)] if hive_id is not None else await hives_in(database, signer)
    public_key = signer.public_key if signer is not None else None
    faults: list[Fault] = []
    count = unanchored = strangers = 0
    for each in hive_ids:
        walk = Walk(Claims(each))
        fault = await _verify_one(database, walk, signer=signer, progress=progress or (lambda _: None))
        if fault is not None:
            faults.append(fault)
        count += walk.seq
        unanchored += walk.unanchored
        strangers += walk.claims.strangers
    said = remarks(public_key, unanchored=unanchored, strangers=strangers)
    return Verdict(count, len(hive_ids), unanchored, tuple(faults), said)


async def total(database: Database, hive_id: str | None = None) -> int:
    """Return how many records verify and export have before them."""
    statement = select(func.coalesce(func.sum(event_heads.c.seq), 0))
    if hive_id is not None:
        statement = statement.where(event_heads.c.hive_id == hive_id)
    async with database.read() as connection:
        return int((await connection.execute(statement)).scalar_one())


async def _verify_one(
    database: Database, walk: Walk, *, signer: Signer | None, progress: Callable[[int], None]
) -> Fault | None:
    hive_id = walk.claims.hive_id
    # What is said about the log is read before the log: an append in between only makes the log longer.
    fault = await _gather(database, walk.claims, signer)
    while fault is None:
        async with database.read() as connection:
            rows = await _chunk(connection, hive_id, after=walk.seq, dialect=database.dialect)
        if not rows:
            break
        fault = walk.past(rows)
        progress(len(rows))
    return fault or walk.claims.unmet(walk.seq) or await _beyond_head(database, walk)


async def _gather(database: Database, claims: Claims, signer: Signer | None) -> Fault | None:
    stored = select(checkpoints).where(checkpoints.c.hive_id == claims.hive_id).order_by(checkpoints.c.seq)
    async with database.read() as connection:
        head = await _head(connection, claims.hive_id)
        signed = [Checkpoint(*row) for row in await connection.execute(stored)]
    if head is not None and head.seq > 0:
        claims.add(head.seq, head.hash, "the database's own note of the end")
    if signer is not None:
        try:
            newest = signer.anchors.newest(claims.hive_id)
        except Corrupt as error:
            return Fault(claims.hive_id, 0, error.message)
        signed += [newest] if newest is not None else []
    for checkpoint in signed:
        if fault := claims.take(checkpoint, signer.public_key if signer is not None else None):
            return fault
    return None


async def _beyond_head(database: Database, walk: Walk) -> Fault | None:
    hive_id = walk.claims.hive_id
    async with database.read() as connection:
        head = await _head(connection, hive_id)
    end = head.seq if head is not None else 0
    if end < walk.seq:
        return Fault(hive_id, end + 1, f"the database's own note says that the log ends at {end}")
    return None


async def _head(connection: AsyncConnection, hive_id: str) -> Row[int, bytes] | None:
    statement = select(event_heads.c.seq, event_heads.c.hash).where(event_heads.c.hive_id == hive_id)
    return (await connection.execute(statement)).one_or_none()


async def _chunk(connection: AsyncConnection, hive_id: str, *, after: int, dialect: str) -> Sequence[Sequence[Any]]:
    copies = [_bytes(column, dialect) for column in _COPIES]
    columns = select(events.c.seq, events.c.hash, _bytes(events.c.record, dialect), *copies)
    beyond = columns.where(events.c.hive_id == hive_id, events.c.seq > after).order_by(events.c.seq)
    # Asked for a bounded range, PostgreSQL does not sort all that is left. Only where the range is empty, at the
    # end or in a large gap, does it take the open question to find what comes next.
    within = beyond.where(events.c.seq <= after + CHUNK)
    rows = (await connection.execute(within)).all()
    return rows or (await connection.execute(beyond.limit(1))).all()


def _bytes(column: ColumnElement[Any], dialect: str) -> ColumnElement[Any]:
    """Ask for the bytes of a text column: SQLite lets any bytes in, and a driver that decodes would choke."""
    if dialect == "sqlite":
        return cast(column, LargeBinary)
    return func.convert_to(column, "UTF8", type_=LargeBinary)


async def hives_in(database: Database, signer: Signer | None = None) -> list[str]:
    tables = (event_heads, events, checkpoints)
    async with database.read() as connection:
        rows = await connection.execute(union(*(select(table.c.hive_id) for table in tables)))
        found = {row[0] for row in rows}
    return sorted(found | set(signer.anchors.hive_ids() if signer is not None else ()))


def remarks(public_key: bytes | None, *, unanchored: int, strangers: int) -> tuple[str, ...]:
    """Say what a verdict leaves open."""
    said = []
    if public_key is None:
        said.append("no signing key was given, so no checkpoint was trusted")
    elif strangers:
        said.append(f"{strangers} checkpoints bear the signature of another key and were not trusted")
    if unanchored:
        said.append(f"unanchored: no trusted checkpoint covers the last {unanchored:,} records")
    return tuple(said)
