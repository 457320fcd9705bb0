"""Contenders that take turns, so that what else happens on the machine meets all of them alike."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

#: Between two namespaces: the kernel takes them down in the background, and would be measured at that instead.
GAP_S = 0.02


@dataclass(slots=True)
class Contender:
    """One way to do the same thing. `act` does it once and returns the figure: seconds, or a rate."""

    name: str
    act: Callable[[], Awaitable[float]]
    rounds: int
    figures: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.figures)

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.figures, n=20, method="inclusive")[-1]

    @property
    def least(self) -> float:
        return min(self.figures)


async def compete(contenders: Sequence[Contender], *, gap_s: float = 0.0) -> None:
    """Let each act in turn, as many rounds as it has, after one round that does not count."""
    for number in range(max(contender.rounds for contender in contenders) + 1):
        for contender in contenders:
            if number <= contender.rounds:
                await asyncio.sleep(gap_s)
                figure = await contender.act()
                if number:
                    contender.figures.append(figure)
