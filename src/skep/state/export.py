"""Take a log out of the database as JSON lines that can be verified without it.

A line is one of two objects, in canonical JSON. For each hive the checkpoints come first:

- `{"checkpoint":{…},"public_key":"…"}`, a signed statement about the hash at a sequence number;
- `{"hash":"…","record":{…}}`, where hash = SHA-256(hash of the line before || the record's canonical JSON).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable

from pydantic_core import from_json
from sqlalchemy import select

from skep.errors import InvalidRequest
from skep.state.chain import Claims, Fault, Verdict, Walk, hives_in, remarks, stated
from skep.state.checkpoint import Checkpoint, Signer, read_checkpoint
from skep.state.database import Database
from skep.state.record import canonical, check_id
from skep.state.schema import checkpoints, events

CHUNK = 1000

_RECORD = re.compile(rb'\{"hash":"([0-9a-f]{64})","record":(\{.*\})\}\n?')


async def export(
    database: Database, hive_id: str | None = None, *, signer: Signer | None = None
) -> AsyncIterator[bytes]:
    """Yield the log of one hive, or of all, line by line; memory stays bounded however long the log is.

    With a signer, the checkpoints made by its key go along.
    """
    for each in [check_id("hive_id", hive_id)] if hive_id is not None else await hives_in(database):
        if signer is not None:
            for checkpoint in await _checkpoints(database, each, signer):
                line = {"checkpoint": checkpoint.as_json(), "public_key": signer.public_key.hex()}
                yield canonical(line) + b"\n"
        async for record in _records(database, each):
            yield record


async def _checkpoints(database: Database, hive_id: str, signer: Signer) -> list[Checkpoint]:
    mine = (checkpoints.c.hive_id == hive_id, checkpoints.c.key_id == signer.key_id)
    async with database.read() as connection:
        rows = await connection.execute(select(checkpoints).where(*mine))
        found = {row.seq: Checkpoint(*row) for row in rows}
    newest = signer.anchors.newest(hive_id)
    if newest is not None:
        found[newest.seq] = newest
    return [found[seq] for seq in sorted(found)]


async def _records(database: Database, hive_id: str) -> AsyncIterator[bytes]:
    seq = 0
    columns = select(events.c.seq, events.c.record, events.c.hash).where(events.c.hive_id == hive_id)
    while True:
        statement = columns.where(events.c.seq > seq).order_by(events.c.seq).limit(CHUNK)
        async with database.read() as connection:
            rows = (await connection.execute(statement)).all()
        if not rows:
            return
        for seq, record, hash_ in rows:  # noqa: B007 - the last seq is where the next chunk begins
            yield f'{{"hash":"{hash_.hex()}","record":{record}}}\n'.encode()


def verify_export(lines: Iterable[bytes], *, public_key: bytes | None = None) -> Verdict:
    """Verify exported lines; checkpoints are trusted when `public_key`, known from elsewhere, signed them."""
    walks: dict[str, Walk] = {}
    faults: dict[str, Fault] = {}
    for number, line in enumerate(lines, start=1):
        walk, fault = _read(walks, line, number=number, public_key=public_key)
        if fault is not None:
            faults.setdefault(walk.claims.hive_id, fault)
    for hive_id, walk in walks.items():
        if hive_id not in faults and (cut := walk.claims.unmet(walk.seq)):
            faults[hive_id] = cut
    unanchored = sum(walk.unanchored for walk in walks.values())
    strangers = sum(walk.claims.strangers for walk in walks.values())
    return Verdict(
        count=sum(walk.seq for walk in walks.values()),
        hives=len(walks),
        unanchored=unanchored,
        faults=tuple(faults[hive_id] for hive_id in sorted(faults)),
        remarks=remarks(public_key, unanchored=unanchored, strangers=strangers),
    )


def _read(walks: dict[str, Walk], line: bytes, *, number: int, public_key: bytes | None) -> tuple[Walk, Fault | None]:
    try:
        parsed = from_json(line)
        hive_id = check_id("hive", (parsed["checkpoint"] if "checkpoint" in parsed else parsed["record"])["hive"])
    except (ValueError, TypeError, KeyError, InvalidRequest) as error:
        raise InvalidRequest(
            f"line {number} is not of an export: {ascii(line)[:60]}",
            hint="write one with: skep events export",
        ) from error
    walk = walks.setdefault(hive_id, Walk(Claims(hive_id)))
    if "checkpoint" in parsed:
        checkpoint = read_checkpoint(canonical(parsed["checkpoint"]), where=f"line {number}")
        return walk, walk.claims.take(checkpoint, public_key)
    found = _RECORD.fullmatch(line)
    if found is None:
        return walk, walk.fault("the line is not canonical JSON")
    hash_, record = found.groups()
    seq, copies = stated(record)
    return walk, walk.past([(seq, bytes.fromhex(hash_.decode()), record, *copies)])
