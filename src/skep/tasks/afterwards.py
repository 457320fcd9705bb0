"""What is done when a task has ended and the reply is out: never before, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import structlog
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import SkepError
from skep.state.events import AfterwardsDone
from skep.state.hives import Hive
from skep.state.schema import event_heads, steps
from skep.tasks.ledger import Ledger
from skep.tasks.run import Durably
from skep.tasks.task import Task

#: A job gets the task and its hive. It may be begun more than once, if a worker died meanwhile.
Job = Callable[[Task, Hive], Awaitable[None]]
Jobs = Mapping[str, Job]


async def follow_up(ledger: Ledger, task: Task, hive: Hive, jobs: Jobs, durably: Durably) -> None:
    """Do each job; one that fails is on record as such and keeps no other from being done."""
    for name, job in jobs.items():
        failure = await durably(name, partial(_attempt, name, job, task, hive))
        await _note(ledger, task, name, failure)


async def _attempt(name: str, job: Job, task: Task, hive: Hive) -> str:
    try:
        await job(task, hive)
    except (SkepError, OSError) as error:
        structlog.get_logger("skep.tasks").warning("afterwards_failed", job=name, task=task.id, error=str(error))
        return str(error) or type(error).__name__
    return ""


async def _note(ledger: Ledger, task: Task, name: str, failure: str) -> None:
    async def once(connection: AsyncConnection) -> None:
        head = select(event_heads.c.seq).where(event_heads.c.hive_id == task.hive_id)
        seq = (await connection.execute(head)).scalar_one() + 1
        await connection.execute(insert(steps).values(task_id=task.id, key=f"afterwards {name}", seq=seq))

    try:
        await ledger.append(task, [AfterwardsDone(job=name, failure=failure or None)], "worker", once)
    except IntegrityError:
        return  # on record by a worker that died right after
