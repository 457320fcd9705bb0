"""The events of a task as server-sent events, whose ids are the numbers in the hive's log."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing

from sse_starlette import EventSourceResponse, ServerSentEvent

from skep.errors import InvalidRequest
from skep.state.chain import total
from skep.state.wire import as_json
from skep.tasks.task import Task
from skep.tasks.tasks import Tasks

#: How often a line that means nothing is sent, so that whoever is between does not give the connection up.
PING_S = 15
#: How long a client may take to read before it is given up: what it has not seen, it finds by its last id.
SEND_S = 30.0
LARGEST_SEQ = 2**53


def stream(tasks: Tasks, task: Task, *, after: int, send_s: float | None = SEND_S) -> EventSourceResponse:
    """Send what happened in a task after that number, then what happens, until the task has ended."""
    return EventSourceResponse(_messages(tasks, task, after), ping=PING_S, send_timeout=send_s, sep="\n")


async def _messages(tasks: Tasks, task: Task, after: int) -> AsyncIterator[ServerSentEvent]:
    async with aclosing(tasks.follow(task, after=after)) as events:
        async for recorded in events:
            # In ASCII: some clients take a line to end at any of the characters that Unicode ends lines with.
            data = json.dumps(as_json(recorded), separators=(",", ":"))
            yield ServerSentEvent(data=data, event=recorded.event.type, id=str(recorded.seq), sep="\n")


def position(last_event_id: str | None, after: int) -> int:
    """Say after which event to begin: the one that the client saw last, if it says so."""
    if last_event_id is None:
        return after
    is_number = last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= len(str(LARGEST_SEQ))
    if not is_number or int(last_event_id) > LARGEST_SEQ:
        raise InvalidRequest("Last-Event-ID is not the id of an event", hint="send the number that came as id:")
    return int(last_event_id)


async def check_seen(tasks: Tasks, task: Task, after: int) -> None:
    """Refuse the number of an event that has not happened: it is one of another hive, and events would be missed."""
    if after > await total(tasks.ledger.database, task.hive_id):
        raise InvalidRequest(
            f"there is no event {after} in the log of {task.hive_id}", hint="begin anew, without Last-Event-ID"
        )
