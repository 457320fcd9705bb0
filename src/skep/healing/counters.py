"""How well healing does: counts by tier, rule and kind of failure, and the share of tasks that came through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skep.state.events import Healed, Recorded, TaskEnded

if TYPE_CHECKING:
    from skep.state.log import EventLog

_PAGE = 1_000


@dataclass(slots=True)
class Counters:
    """A fold over the event log, so that it is the same wherever and whenever it is counted."""

    by_tier: Counter[int] = field(default_factory=Counter)
    by_rule: Counter[str] = field(default_factory=Counter)
    by_failure: Counter[str] = field(default_factory=Counter)
    #: The tasks that met a kind of failure and have ended, and those of them that ended well.
    ended: Counter[str] = field(default_factory=Counter)
    healed: Counter[str] = field(default_factory=Counter)
    _met: dict[str, set[str]] = field(default_factory=dict)

    def add(self, recorded: Recorded) -> None:
        """Take one record into account; records of one task come in their order."""
        match recorded.event:
            case Healed() as event:
                self._count(event)
                self._met.setdefault(recorded.task_id or "", set()).add(event.failure)
            case TaskEnded(status=status):
                met = self._met.pop(recorded.task_id or "", set())
                if status != "cancelled":
                    self.ended.update(met)
                if status == "succeeded":
                    self.healed.update(met)

    def _count(self, event: Healed) -> None:
        self.by_tier[event.tier] += 1
        self.by_rule[event.rule] += 1
        self.by_failure[event.failure] += 1

    def rates(self) -> dict[str, float]:
        """Return by kind of failure the share of the ended tasks with it that succeeded."""
        return {failure: self.healed[failure] / ended for failure, ended in sorted(self.ended.items())}


def count(records: Iterable[Recorded]) -> Counters:
    """Count a whole log, or a part of it."""
    counters = Counters()
    for recorded in records:
        counters.add(recorded)
    return counters


async def count_hive(log: EventLog, hive_id: str) -> Counters:
    """Count the whole log of a hive, page by page."""
    counters, last = Counters(), 0
    while page := await log.page(hive_id, after=last, limit=_PAGE, types=("healed", "task_ended")):
        for recorded in page:
            counters.add(recorded)
        last = page[-1].seq
    return counters
