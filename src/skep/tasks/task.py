"""One prompt on its way to a reply, as it stands on record."""

from __future__ import annotations

import re
import secrets
from base64 import b32encode
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, get_args

from skep.errors import NotFound
from skep.state.names import shown
from skep.state.record import write_time

Status = Literal["waiting", "queued", "running", "asking", "cancelling", "succeeded", "failed", "cancelled"]
End = Literal["succeeded", "failed", "cancelled"]
STATUSES: tuple[Status, ...] = get_args(Status)
#: Those from which a task comes to no other.
ENDED: tuple[End, ...] = get_args(End)
OPEN: tuple[Status, ...] = ("waiting", "queued", "running", "asking", "cancelling")
#: Those in which a worker has the task.
HELD: tuple[Status, ...] = ("running", "asking", "cancelling")

_ID = re.compile(r"tsk_[a-z2-7]{26}")


def new_task_id() -> str:
    return "tsk_" + b32encode(secrets.token_bytes(16)).decode().lower().rstrip("=")


def is_task_id(value: str) -> bool:
    return _ID.fullmatch(value) is not None


def missing(task_id: str) -> NotFound:
    return NotFound(f"there is no task {shown(task_id)}", hint="list them with: skep task list")


@dataclass(frozen=True, slots=True)
class Task:
    """A task as it was when it was read.

    `usd` is the sum of what could be priced, and `unpriced` counts the model calls that could not. `root` is the task
    that a person asked for, `parent` the one that made this one; `origin` and `step` say what it was forked from.
    """

    id: str
    account_id: str
    hive_id: str
    thread: str
    prompt: str
    status: Status
    created_at: datetime
    root: str
    parent: str | None = None
    title: str = ""
    #: Ids of the tasks that come before this one.
    after: tuple[str, ...] = ()
    origin: str | None = None
    step: int = 0
    #: On what it was begun, as JSON; see `skep.tasks.agreement`.
    agreement: str | None = None
    #: The process that has it, and how often one began it.
    worker: str | None = None
    starts: int = 0
    attempt: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    reply: str | None = None
    confidence: float | None = None
    #: Whether a limit ended the work before it was done, or some of the tasks of its plan did not succeed.
    partial: bool = False
    #: Why it failed or was cancelled, in words for the person.
    error: str | None = None
    usd: float = 0.0
    unpriced: int = 0
    tokens: int = 0
    #: Whether the answers came from a script and not from a model.
    scripted: bool = False

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def as_json(self) -> dict[str, Any]:
        """Return it for whoever is outside: without the name of the process that has it."""
        return {
            "id": self.id,
            "hive": self.hive_id,
            "thread": self.thread,
            "status": self.status,
            "prompt": self.prompt,
            "title": self.title,
            "reply": self.reply,
            "confidence": self.confidence,
            "partial": self.partial,
            "scripted": self.scripted,
            "error": self.error,
            "usd": self.usd,
            "unpriced_calls": self.unpriced,
            "tokens": self.tokens,
            "attempt": self.attempt,
            "starts": self.starts,
            "parent": self.parent,
            "root": self.root,
            "after": list(self.after),
            "origin": self.origin,
            "origin_step": self.step if self.origin else None,
            "created_at": write_time(self.created_at),
            "started_at": None if self.started_at is None else write_time(self.started_at),
            "ended_at": None if self.ended_at is None else write_time(self.ended_at),
        }


@dataclass(frozen=True, slots=True)
class Step:
    """One durable step of a task; `number` is what `fork` takes to begin after it."""

    number: int
    kind: str
    what: str
    status: Literal["done", "running", "interrupted"]
    at: datetime

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "kind": self.kind,
            "what": self.what,
            "status": self.status,
            "at": write_time(self.at),
        }
