"""Taking a prompt: what it must be like, and what becomes of it when its thread is busy."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import InvalidRequest, NotFound, ThreadBusy
from skep.state.hives import Hive
from skep.state.record import read_time, write_time
from skep.state.schema import hives, tasks
from skep.state.upkeep import SameThread
from skep.tasks.ledger import insert_task
from skep.tasks.task import ENDED, Status, Task, new_task_id

MOST_PROMPT_BYTES = 256 * 1024
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_KEY = re.compile(r"[\x21-\x7e]{1,200}")


def check_prompt(prompt: str, *, named: str = "prompt") -> str:
    """Return a prompt that can be worked on, or raise InvalidRequest saying what is wrong with it."""
    if not prompt.strip():
        raise InvalidRequest(f"the {named} is empty", hint="say what is to be done")
    if found := _CONTROL.search(prompt):
        raise InvalidRequest(
            f"the {named} has a character that is not text, {found[0]!a} at position {found.start()}",
            hint="send other than text as an attachment",
        )
    if (size := len(prompt.encode())) > MOST_PROMPT_BYTES:
        raise InvalidRequest(
            f"the {named} has {size:,} bytes, at most {MOST_PROMPT_BYTES:,} are taken",
            hint="send long texts as an attachment",
        )
    return prompt


def check_key(key: str | None) -> str | None:
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidRequest("the idempotency key is not usable", hint="use 1 to 200 printable characters, no spaces")
    return key


def new_row(hive: Hive, prompt: str, *, thread: str, actor: str, now: datetime, **values: Any) -> dict[str, Any]:
    """Return the row of a new task, not yet in line."""
    task_id = values.pop("id", None) or new_task_id()
    after = json.dumps(values.pop("after", ()))
    return {
        "id": task_id,
        "account_id": hive.account_id,
        "hive_id": hive.id,
        "thread": thread,
        "root": task_id,
        "prompt": prompt,
        "actor": actor,
        "same_thread": hive.upkeep.same_thread,
        "enqueued": False,
        "partial": False,
        "scripted": False,
        "created_at": write_time(now),
        "status": "queued",
        "after": after,
        **values,
    }


def new_task(row: dict[str, Any]) -> Task:
    """Return the task of a row that was just put in line."""
    told = {name: row[name] for name in Task.__dataclass_fields__ if name in row}
    return Task(**{**told, "created_at": read_time(row["created_at"]), "after": tuple(json.loads(row["after"]))})


async def enter(connection: AsyncConnection, row: dict[str, Any]) -> None:
    """Put a task that a person asked for in line, as its hive says; ThreadBusy if that takes one at a time."""
    await _require_hive(connection, row["hive_id"])
    known = await _line(connection, row["hive_id"], row["thread"])
    busy = [one.id for one in known if one.status not in ENDED]
    choice: SameThread = row["same_thread"]
    if busy and choice == "reject":
        raise ThreadBusy(
            f"the thread {row['thread']} has the task {busy[-1]}, which is not done",
            hint=f"wait for it, or end it with: skep task cancel {busy[-1]}",
        )
    status: Status = "waiting" if busy else "queued"
    row |= {"status": status, "created_at": _behind(row["created_at"], known[-1].created_at if known else None)}
    await insert_task(connection, row)


async def _line(connection: AsyncConnection, hive_id: str, thread: str) -> Sequence[Row[str, str, str]]:
    """Return the tasks of a thread that have not ended, and its latest whatever became of it; oldest first."""
    same = (tasks.c.hive_id == hive_id, tasks.c.thread == thread, tasks.c.parent.is_(None))
    latest = select(func.max(tasks.c.created_at)).where(*same).scalar_subquery()
    told = or_(tasks.c.status.not_in(ENDED), tasks.c.created_at == latest)
    statement = select(tasks.c.id, tasks.c.status, tasks.c.created_at).where(*same, told)
    return (await connection.execute(statement.order_by(tasks.c.created_at, tasks.c.id))).all()


def _behind(at: str, latest: str | None) -> str:
    """Return a time that is later than the latest of a thread, in which prompts are carried out in the order of times.

    Clocks of two machines differ, and of two prompts that come at once either may be the first to be taken.
    """
    if latest is None or at > latest:
        return at
    return write_time(read_time(latest) + timedelta(microseconds=1))


async def _require_hive(connection: AsyncConnection, hive_id: str) -> None:
    alive = select(hives.c.id).where(hives.c.id == hive_id, hives.c.deleted_at.is_(None))
    if (await connection.execute(alive)).one_or_none() is None:
        raise NotFound(f"there is no hive {hive_id} any more", hint="list them with: skep hive list")
