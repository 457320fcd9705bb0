"""What a task has used and may still use, the same whenever its steps are gone through again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skep.errors import LimitReached
from skep.tasks.agreement import Bounds

if TYPE_CHECKING:
    from skep.models.prices import Spend


@dataclass(slots=True)
class Meter:
    """Counts all that a task uses, whoever asks for it: the queen, a worker or a reflection.

    The time it waits for a person, for other tasks, or for a worker to take it over, does not count.
    """

    bounds: Bounds = field(default_factory=Bounds)
    clock: Callable[[], float] = time.monotonic
    usd: float = 0.0
    tokens: int = 0
    requests: int = 0
    _before: float = 0.0
    _since: float = field(default=0.0)

    def __post_init__(self) -> None:
        self._since = self.clock()

    @property
    def elapsed_s(self) -> float:
        return self._before + self.clock() - self._since

    @property
    def left_s(self) -> float:
        """The time that is left, which may be less than none."""
        return self.bounds.seconds - self.elapsed_s

    def go_on_from(self, elapsed_s: float) -> None:
        """Count on from what was used when a step that is on record was done."""
        self._before, self._since = max(self._before, elapsed_s), self.clock()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        before = self.elapsed_s
        try:
            yield
        finally:
            self._before, self._since = before, self.clock()

    def add(self, requests: int, spend: Spend | None) -> None:
        self.requests += requests
        if spend is not None:
            self.tokens += spend.tokens
            self.usd += float(spend.usd or 0)

    def check(self, *, last: bool) -> None:
        """Raise LimitReached if no more can be asked of a model; its time is looked at where that is spent.

        One request is kept for the `last`: the reply of a task that has to end with what it has.
        """
        if self.requests >= self.bounds.requests - (not last):
            raise used_up("requests")
        if self.tokens >= self.bounds.tokens:
            raise used_up("tokens")
        if self.bounds.usd is not None and 0 < self.usd >= self.bounds.usd:
            raise used_up("usd")


def used_up(which: str) -> LimitReached:
    return LimitReached(f"the task has used up its {which}", hint=f"raise budgets.{which}_per_task, or ask for less")
