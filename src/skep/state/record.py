"""One record of the log: its canonical bytes (RFC 8785) and the hash that chains it to the one before.

A record is the canonical JSON of {"account","actor","at","body","hive","seq","task","type","v"}. Its hash is
SHA-256(hash of the record before || record); the first one follows 32 zero bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import rfc8785

from skep.errors import Corrupt, InvalidRequest
from skep.state.events import Event, Recorded, recorded_event

GENESIS = bytes(32)
MAX_BODY_BYTES = 1024 * 1024
"""The largest body of one event, as canonical JSON. Larger things are files, and the event names the file."""

MAX_DEPTH = 100
"""How deeply a body may nest: the parser that reads it back gives up at 200."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}")


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a hive's log: the last sequence number, its hash and its time."""

    seq: int = 0
    hash: bytes = GENESIS
    at: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """An event checked and made canonical, but for its place: the number and the time are the writer's."""

    event: Event
    hive_id: str
    account_id: str
    actor: str
    task_id: str | None
    before_at: bytes
    before_seq: bytes
    after_seq: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.before_seq)

    def seal(self, head: Head, at: str) -> Sealed:
        """Give the draft the place after `head`."""
        seq = head.seq + 1
        # The keys of the envelope are in canonical order, so joining canonical parts is canonical.
        record = b'%b"%b"%b%d%b' % (self.before_at, at.encode(), self.before_seq, seq, self.after_seq)
        return Sealed(self, record, Head(seq, link(head.hash, record), at))


@dataclass(frozen=True, slots=True)
class Sealed:
    """A draft in its place: `head` is the end of the log once this record is in."""

    draft: Draft
    record: bytes
    head: Head

    def row(self) -> dict[str, Any]:
        draft, head = self.draft, self.head
        return {
            "hive_id": draft.hive_id,
            "seq": head.seq,
            "account_id": draft.account_id,
            "task_id": draft.task_id,
            "type": draft.event.type,
            "at": head.at,
            "actor": draft.actor,
            "record": self.record.decode(),
            "hash": head.hash,
        }

    def recorded(self) -> Recorded:
        draft, head = self.draft, self.head
        return Recorded(
            hive_id=draft.hive_id,
            seq=head.seq,
            at=read_time(head.at),
            actor=draft.actor,
            account_id=draft.account_id,
            task_id=draft.task_id,
            event=draft.event,
            hash=head.hash,
        )


def draft(event: Event, *, hive_id: str, account_id: str, actor: str, task_id: str | None = None) -> Draft:
    """Check an event and what it is filed under; raise InvalidRequest for what the log cannot keep."""
    for name, value in (("hive_id", hive_id), ("account_id", account_id), ("actor", actor)):
        check_id(name, value)
    if task_id is not None:
        check_id("task_id", task_id)
    body = canonical(event.model_dump(exclude={"type", "v"}), what=f"the {event.type} event")
    if len(body) > MAX_BODY_BYTES:
        raise InvalidRequest(
            f"the {event.type} event has {len(body):,} bytes; the log takes at most {MAX_BODY_BYTES:,}",
            hint="put the content in a file and name the file in the event",
        )
    _check_depth(body, event.type)
    # Identifiers and types hold nothing that JSON escapes: see _ID.
    task = f'"{task_id}"' if task_id is not None else "null"
    return Draft(
        event=event,
        hive_id=hive_id,
        account_id=account_id,
        actor=actor,
        task_id=task_id,
        before_at=f'{{"account":"{account_id}","actor":"{actor}","at":'.encode(),
        before_seq=b',"body":%b,"hive":"%b","seq":' % (body, hive_id.encode()),
        after_seq=f',"task":{task},"type":"{event.type}","v":{event.v}}}'.encode(),
    )


def _check_depth(body: bytes, type_: str) -> None:
    # Few bodies have so many brackets that they could be too deep, so the exact answer is seldom asked for.
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and _depth(json.loads(body)) > MAX_DEPTH:
        raise InvalidRequest(
            f"the {type_} event is nested more than {MAX_DEPTH} deep", hint="flatten it, or send it as text"
        )


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def is_id(value: str) -> bool:
    return _ID.fullmatch(value) is not None


def check_id(name: str, value: str) -> str:
    if not is_id(value):
        raise InvalidRequest(
            f"{name} is not a valid identifier: {ascii(value)[:60]}",
            hint="use 1 to 128 letters, digits and . _ : @ + - and begin with a letter or a digit",
        )
    return value


def canonical(value: Any, *, what: str = "the value") -> bytes:
    """Return the canonical JSON (RFC 8785), or raise InvalidRequest naming what JSON cannot carry."""
    try:
        return rfc8785.dumps(value)
    except ValueError as error:  # the library's own errors, and those of str.encode and int
        raise InvalidRequest(
            f"{what} cannot be kept as JSON: {str(error)[:200]}",
            hint="text must be valid Unicode, numbers finite, and integers within ±(2**53 - 1): "
            "send a larger one as text",
        ) from error


def link(previous: bytes, record: bytes) -> bytes:
    """Return the hash of a record that follows the one whose hash is `previous`."""
    return sha256(previous + record).digest()


def read_record(record: str, hash_: bytes) -> Recorded:
    """Read a stored record back; the hash is taken as it is, checking it is the chain's work."""
    try:
        envelope = json.loads(record, parse_int=_number)
    except (ValueError, RecursionError) as error:
        raise Corrupt(
            f"a record of the event log is not JSON: {ascii(record)[:60]}",
            hint="find the damage with: skep events verify",
        ) from error
    return Recorded(
        hive_id=envelope["hive"],
        seq=envelope["seq"],
        at=read_time(envelope["at"]),
        actor=envelope["actor"],
        account_id=envelope["account"],
        task_id=envelope["task"],
        event=recorded_event(envelope),
        hash=hash_,
    )


def _number(digits: str) -> int | float:
    # RFC 8785 writes floats up to 1e21 without a fraction; no integer that large is ever accepted.
    return int(digits) if len(digits) < 16 or abs(int(digits)) < 2**53 else float(digits)


def write_time(moment: datetime) -> str:
    """Return the one form of a time in the log, in which text order is time order."""
    if moment.tzinfo is None:
        raise InvalidRequest(
            f"the time {moment.isoformat()} has no time zone", hint="write it with one, such as +00:00"
        )
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def read_time(text: str) -> datetime:
    return datetime.fromisoformat(text)
