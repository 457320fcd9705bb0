"""What a task has cost, as its record tells it: whoever worked on it, and however it ended."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select

from skep.models.spec import REHEARSAL
from skep.state.events import ModelCalled
from skep.state.schema import tasks
from skep.tasks.ledger import Ledger
from skep.tasks.task import Task

_PAGE = 10_000


@dataclass(frozen=True, slots=True)
class Use:
    """The sum of a task's model calls and of those of the tasks that it had others do.

    `usd` is of the calls that could be priced, `unpriced` counts the others; `scripted`: some were no model's.
    """

    usd: float = 0.0
    unpriced: int = 0
    tokens: int = 0
    scripted: bool = False

    def __add__(self, other: Use) -> Use:
        return Use(
            self.usd + other.usd,
            self.unpriced + other.unpriced,
            self.tokens + other.tokens,
            self.scripted or other.scripted,
        )


async def read_use(ledger: Ledger, task: Task) -> Use:
    called = await ledger.log.page(task.hive_id, task_id=task.id, types=("model_called",), limit=_PAGE)
    parts = [_use(one.event) for one in called if isinstance(one.event, ModelCalled)]
    children = await ledger.select(select(tasks).where(tasks.c.parent == task.id))
    parts += [Use(one.usd, one.unpriced, one.tokens, one.scripted) for one in children]
    return sum(parts, Use())


def _use(called: ModelCalled) -> Use:
    tokens = called.input_tokens + called.output_tokens
    return Use(called.usd or 0.0, int(called.usd is None), tokens, called.provider == REHEARSAL)
