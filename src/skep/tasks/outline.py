"""The steps of a task as a person sees them: read from its record, without the engine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sqlalchemy import select

from skep.state.events import Gathered, ModelCalled, Observed, Proposed, Recorded, Ruled
from skep.state.record import read_record
from skep.state.schema import events, steps
from skep.tasks.ledger import Ledger
from skep.tasks.task import Step, Task

_KEY = re.compile(r"(?:(?P<life>\d+)/)?(?:(?P<number>\d{6}) )?")
_LONGEST = 160


def step_key(number: int, what: str) -> str:
    """Return the key of an event that belongs to a numbered step."""
    return f"{number:06d} {what}"


async def read_steps(ledger: Ledger, task: Task) -> tuple[Step, ...]:
    """Return the steps that are on record, with those that it took over, and the one that is under way."""
    taken = await _taken_over(ledger, task)
    entries = _latest(await _entries(ledger, task))
    proposed = {one.event.call: one.event for _, one in entries if isinstance(one.event, Proposed)}
    found = [_step(number, one, proposed) for number, one in entries if number]
    last = found[-1].number if found else task.step
    return (*taken, *found, *_under_way(task, (one for _, one in entries), proposed, last))


def _latest(entries: list[tuple[str, Recorded]]) -> list[tuple[int, Recorded]]:
    """Return what belongs to the last life of a task, each with the number of its step, or 0."""
    read = [(match, one) for key, one in entries if (match := _KEY.match(key)) is not None]
    life = max((int(match["life"] or 0) for match, _ in read), default=0)
    return [(int(match["number"] or 0), one) for match, one in read if int(match["life"] or 0) == life]


async def _taken_over(ledger: Ledger, task: Task) -> tuple[Step, ...]:
    origin = await ledger.find(task.origin) if task.origin and task.step else None
    if origin is None:
        return ()
    return tuple(step for step in await read_steps(ledger, origin) if step.number <= task.step)


async def _entries(ledger: Ledger, task: Task) -> list[tuple[str, Recorded]]:
    both = (steps.c.seq == events.c.seq) & (events.c.hive_id == task.hive_id)
    statement = select(steps.c.key, events.c.record, events.c.hash).select_from(steps.join(events, both))
    statement = statement.where(steps.c.task_id == task.id).order_by(steps.c.seq)
    async with ledger.database.read() as connection:
        rows = (await connection.execute(statement)).all()
    return [(row.key, read_record(row.record, row.hash)) for row in rows]


def _step(number: int, recorded: Recorded, proposed: dict[str, Proposed]) -> Step:
    match recorded.event:
        case ModelCalled() as called:
            return Step(number, "think", f"{called.role}: {called.provider}/{called.model}", "done", recorded.at)
        case Observed() as observed:
            what = describe(proposed[observed.call].action) if observed.call in proposed else observed.call
            cut = observed.observation.get("kind") == "interrupted"
            return Step(number, "act", what, "interrupted" if cut else "done", recorded.at)
        case Gathered(tasks=gathered):
            return Step(number, "gather", f"{len(gathered)} tasks", "done", recorded.at)
        case event:
            return Step(number, event.type, "", "done", recorded.at)


def _under_way(task: Task, recorded: Iterable[Recorded], proposed: dict[str, Proposed], last: int) -> Iterable[Step]:
    """Return the act that was allowed and has not come to its end, while the task runs."""
    allowed: dict[str, Recorded] = {}
    for one in recorded:
        if isinstance(one.event, Ruled) and one.event.ruling == "allow":
            allowed[one.event.call] = one
        elif isinstance(one.event, Observed):
            allowed.pop(one.event.call, None)
    for call, one in allowed.items():
        if not task.ended and call in proposed:
            yield Step(last + 1, "act", describe(proposed[call].action), "running", one.at)


#: What tells most about an act, in this order.
_TELLING = ("command", "code", "path", "skill", "url", "question", "port", "job", "reply", "tool")


def describe(action: dict[str, Any]) -> str:
    """Say in one line what an act is: its kind, and the argument that tells most."""
    kind = str(action.get("kind", "act"))
    told = next((str(action[name]) for name in _TELLING if action.get(name)), "")
    return " ".join(f"{kind} {told}".split())[:_LONGEST]
