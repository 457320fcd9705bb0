"""The day's log of a hive: each task once, for people to read and for later tasks to find."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from skep.state.events import FailureNoted, Healed, Observed, Proposed, Recorded, Reflected
from skep.state.hives import Hive
from skep.tasks.ledger import Ledger
from skep.tasks.outline import describe
from skep.tasks.task import Task

#: Of one task, the most lines at each of its ends, and the most of one line.
_LINES = 40
_LINE_CHARS = 300
_EVENTS = ("proposed", "observed", "healed", "reflected", "failure_noted")


async def append_trajectory(ledger: Ledger, household: Path, task: Task, hive: Hive) -> None:
    """Add a task that has ended to the log of the day on which it did."""
    happened = await ledger.log.page(hive.id, task_id=task.id, types=_EVENTS, limit=2_000)
    day = (task.ended_at or ledger.now()).strftime("%Y-%m-%d")
    entry = "\n".join([*_head(task), *_lines(happened), ""])
    await asyncio.to_thread(_append_once, household / "memory" / f"{day}.md", _mark(task), entry, f"# {day}\n")


def _mark(task: Task) -> str:
    return f"<!-- {task.id} -->"


def _head(task: Task) -> Iterable[str]:
    ended = task.ended_at.strftime("%H:%M") if task.ended_at else "--:--"
    yield ""
    yield f"## {ended} {_line(task.title or task.prompt, 80)} ({task.status}) {_mark(task)}"
    yield f"- asked: {_line(task.prompt)}"
    if task.reply:
        sure = "" if task.confidence is None else f" ({task.confidence:.0%} sure)"
        yield f"- replied{' in part' if task.partial else ''}: {_line(task.reply)}{sure}"
    if task.error:
        yield f"- ended: {_line(task.error)}"


def _lines(happened: Iterable[Recorded]) -> Iterable[str]:
    """Tell what happened; of a long task its beginning, and its end with what it failed of."""
    lines = [line for one in happened for line in _told(one)]
    left_out = len(lines) - 2 * _LINES
    if left_out <= 0:
        yield from lines
        return
    yield from lines[:_LINES]
    yield f"- … {left_out} more …"
    yield from lines[-_LINES:]


def _told(recorded: Recorded) -> Iterable[str]:
    match recorded.event:
        case Proposed(action=action):
            yield f"- {_line(describe(action))}"
        case Observed(observation={"kind": "trouble", "failure": str(failure), "message": str(message)}):
            yield f"  - {failure}: {_line(message)}"
        case Observed(observation={"exit_code": int(code)}) if code != 0:
            yield f"  - exit code {code}"
        case Healed(failure=failure, remedy=remedy, detail=detail):
            yield f"- healed {failure} by {remedy} ({_line(detail)})"
        case Reflected(note=note):
            yield f"- reflected: {_line(note)}"
        case FailureNoted() as noted:
            yield f"- failure: {_line(noted.signature)}"
            yield from (f"  - tried: {_line(one)}" for one in noted.tried)
            yield f"  - root cause: {_line(noted.root_cause)}"
            yield f"  - guidance: {_line(noted.guidance)}"


def _line(text: str, most: int = _LINE_CHARS) -> str:
    """Put a text in one line that can neither end a comment nor look like a heading."""
    flat = " ".join(text.replace("<!--", "<! --").split())
    return flat if len(flat) <= most else f"{flat[:most]} …"


def _append_once(file: Path, mark: str, entry: str, heading: str) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with open(fd, "r+b") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        known = log.read()
        if mark.encode() in known:
            return
        log.write(((heading if not known else "") + entry).encode())
        log.flush()
        os.fsync(log.fileno())
