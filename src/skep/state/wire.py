"""A recorded event as JSON for programs, and back from it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from skep.errors import InvalidRequest
from skep.state.events import Recorded, parse_event


def as_json(recorded: Recorded) -> dict[str, Any]:
    return {
        "hive": recorded.hive_id,
        "seq": recorded.seq,
        "at": recorded.at.isoformat().replace("+00:00", "Z"),
        "actor": recorded.actor,
        "account": recorded.account_id,
        "task": recorded.task_id,
        "type": recorded.event.type,
        "body": recorded.event.model_dump(mode="json", exclude={"type", "v"}),
        "hash": recorded.hash.hex(),
    }


def from_json(data: Any) -> Recorded:
    """Build what `as_json` wrote; raise InvalidRequest for what it did not write."""
    try:
        return Recorded(
            hive_id=data["hive"],
            seq=int(data["seq"]),
            at=datetime.fromisoformat(data["at"]),
            actor=data["actor"],
            account_id=data["account"],
            task_id=data["task"],
            event=parse_event({"type": data["type"], **data["body"]}),
            hash=bytes.fromhex(data["hash"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest("not an event of a log", hint="is it another Skep that speaks?") from error
