"""What a model is asked for, and how to reach one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

Level = Literal["light", "normal", "super"]
Role = Literal["classify", "reflect", "gate", "plan", "work", "author", "revise", "reply"]

LEVELS: tuple[Level, ...] = ("light", "normal", "super")
ROLE_LEVELS: dict[Role, Level] = {
    "classify": "light",
    "reflect": "light",
    "gate": "light",
    "plan": "normal",
    "work": "normal",
    "reply": "normal",
    "author": "super",
    "revise": "super",
}

#: The provider whose answers are read from a script.
REHEARSAL = "rehearsal"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One configured model. For rehearsal the id is the path of its script, or the name of a built-in one.

    `lacks` names the environment variable that should hold its key and does not; such a model is never asked.
    """

    provider: str
    id: str
    level: Level = "normal"
    base_url: str | None = None
    key: str | None = field(default=None, repr=False)
    supports_json: bool = True
    vision: bool = False
    lacks: str | None = None

    @property
    def is_scripted(self) -> bool:
        return self.provider == REHEARSAL

    @property
    def title(self) -> str:
        """The model's name as it is shown and recorded: a script goes by its file's name alone."""
        return PurePath(self.id).stem if self.is_scripted else self.id

    @property
    def name(self) -> str:
        """Tell this model from all others: provider/title."""
        return f"{self.provider}/{self.title}"


def by_nearness(level: Level) -> tuple[Level, ...]:
    """Order the levels for a request: the one asked for, then the stronger ones, then the weaker ones."""
    at = LEVELS.index(level)
    return (*LEVELS[at:], *reversed(LEVELS[:at]))
