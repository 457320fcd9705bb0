"""What holds for a task from its first start to its end, whatever is set otherwise meanwhile.

A task that another worker goes on with, or that was forked, comes to the same steps only if all that decides about them
is as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from skep.healing.history import Options

if TYPE_CHECKING:
    from skep.agent.loop import Limits


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one task may use before it has to end with what it has; None sets no limit."""

    usd: float | None = 2.0
    steps: int = 50
    requests: int = 100
    tokens: int = 2_000_000
    seconds: float = 3600.0

    def limits(self) -> Limits:
        from skep.agent.loop import Limits

        return Limits(self.steps, self.requests, self.tokens, self.usd, self.seconds)


class Agreement(BaseModel):
    """On what a task was begun.

    `queen`: a person asked for it, so the queen decides how it is answered. `confidence` is the least with which an
    answer is taken as it is; `providers`, `reflection` and `stronger` are what the models that were configured offer to
    healing. `keeps`: the state of the workspace before it is kept, and `undoes` is the one to return to first;
    `shared`: there would be one, if others had not worked there since.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    queen: bool
    healing: bool
    browser: bool
    bounds: Bounds
    confidence: float
    providers: tuple[str, ...]
    reflection: bool
    stronger: bool
    keeps: bool = False
    undoes: str | None = None
    shared: bool = False

    def options(self, seconds_left: float | None) -> Options:
        """Say what there is to heal the task with, while it has so much time left."""
        return Options(
            healing=self.healing,
            providers=self.providers,
            reflection=self.reflection,
            stronger=self.stronger,
            seconds_left=seconds_left,
        )
