"""Questions to a person, and the wait for an answer, which may take longer than a worker lives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Literal

from skep.state.events import Answered, Asked
from skep.state.record import read_time, write_time
from skep.tasks.journal import event_of
from skep.tasks.ledger import Ledger
from skep.tasks.meter import Meter
from skep.tasks.run import Run

#: What is said to an act that needs a person's leave.
YES, NO = "yes", "no"


class Questions:
    """Asks whoever answers for the hive. A question is on record once, and keeps its deadline."""

    def __init__(self, run: Run, ledger: Ledger, meter: Meter, *, patience_s: float) -> None:
        self._run = run
        self._ledger = ledger
        self._meter = meter
        self._patience = timedelta(seconds=patience_s)

    async def put(
        self, call: str, question: str, *, kind: Literal["question", "approval"], choices: Sequence[str] = ()
    ) -> str | None:
        """Return the answer, or None if nobody gave one in time."""
        key, journal = f"asked {call}", self._run.journal
        if key not in journal:
            until = write_time(self._ledger.now() + self._patience)
            asked = Asked(call=call, kind=kind, question=question, choices=tuple(choices), until=until)
            await journal.record((key, asked), status="asking")
        recorded = await journal.read(key)
        known = await self._known(call, recorded.seq)
        if known is not None:
            return known
        await journal.flush(status="asking")  # a worker that took the task over has said that it runs
        with self._meter.standing_still():
            answer = await self._wait(call, recorded.seq, until=read_time(event_of(recorded, Asked).until))
        if answer is None:
            await journal.flush(status="running")
        return answer

    async def _known(self, call: str, after: int) -> str | None:
        task = self._run.task
        for one in await self._ledger.log.page(task.hive_id, after=after, task_id=task.id, types=("answered",)):
            if isinstance(one.event, Answered) and one.event.call == call:
                return one.event.answer
        return None

    async def _wait(self, call: str, after: int, *, until: datetime) -> str | None:
        left_s = (until - self._ledger.now()).total_seconds()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                return await self._hear(call, after)
        except TimeoutError:
            return None

    async def _hear(self, call: str, after: int) -> str | None:
        task = self._run.task
        stream = self._ledger.log.follow(task.hive_id, after=after, task_id=task.id, types=("answered",))
        async with aclosing(stream) as answers:
            async for one in answers:
                if isinstance(one.event, Answered) and one.event.call == call:
                    return one.event.answer
        return None
