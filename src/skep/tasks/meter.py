"""What a task has used: time, tokens and money, the same whenever its steps are gone through again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skep.models.prices import Spend


@dataclass(slots=True)
class Meter:
    """Counts what a task uses. The time it waits for a person, or for a worker to take it over, does not count."""

    usd: float = 0.0
    unpriced: int = 0
    tokens: int = 0
    scripted: bool = False
    clock: Callable[[], float] = time.monotonic
    _before: float = 0.0
    _since: float = field(default=0.0)

    def __post_init__(self) -> None:
        self._since = self.clock()

    @property
    def elapsed_s(self) -> float:
        return self._before + self.clock() - self._since

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

    def add(self, spend: Spend, *, scripted: bool) -> None:
        self.tokens += spend.input_tokens + spend.output_tokens
        self.scripted = self.scripted or scripted
        if spend.usd is None:
            self.unpriced += 1
        else:
            self.usd += float(spend.usd)
