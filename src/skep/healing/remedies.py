"""What can be done about a failure: imperative values that `tasks` carries out.

Each remedy belongs to one rule of one tier, so that a record of the one names the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

Tier = Literal[1, 2, 3]


class _Remedy:
    __slots__ = ()

    tier: ClassVar[Tier] = 1
    rule: ClassVar[str]

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def detail(self) -> str:
        """What the name does not say: for how long, which tool, which provider."""
        return ""


@dataclass(frozen=True, slots=True)
class DoubleTimeout(_Remedy):
    """Give a tool twice its time, and try again."""

    rule = "tool_timeout"
    tool: str

    @property
    def detail(self) -> str:
        return self.tool


@dataclass(frozen=True, slots=True)
class BackOff(_Remedy):
    """Wait, and ask the same provider again."""

    rule = "rate_limit"
    seconds: float

    @property
    def detail(self) -> str:
        return f"{self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class InstructStricter(_Remedy):
    """Ask again with an instruction that leaves no other way to answer."""

    rule = "invalid_output"
    text: str


@dataclass(frozen=True, slots=True)
class UseFallbackTool(_Remedy):
    """Use another tool where one came back with nothing."""

    rule = "empty_result"
    tool: str
    instead: str

    @property
    def detail(self) -> str:
        return f"{self.instead} instead of {self.tool}"


@dataclass(frozen=True, slots=True)
class SwitchProvider(_Remedy):
    """Ask another provider from now on."""

    rule = "circuit_open"
    avoid: str
    use: str

    @property
    def detail(self) -> str:
        return f"{self.use} instead of {self.avoid}"


@dataclass(frozen=True, slots=True)
class RetryNow(_Remedy):
    """Try the same once more, at once."""

    rule = "transient"


@dataclass(frozen=True, slots=True)
class ResolveAgain(_Remedy):
    """Resolve the session anew, and try again in the sandbox that comes of it."""

    rule = "sandbox_lost"


@dataclass(frozen=True, slots=True)
class Compact(_Remedy):
    """Make the conversation shorter, and go on with it."""

    rule = "context_overflow"


@dataclass(frozen=True, slots=True)
class OfferInstall(_Remedy):
    """Tell the worker what is missing, and the call that installs it."""

    rule = "missing_package"
    packages: tuple[str, ...]
    ecosystem: str = "python"

    @property
    def detail(self) -> str:
        return ", ".join(self.packages)


@dataclass(frozen=True, slots=True)
class Escalate(_Remedy):
    """Ask a model of a higher level."""

    rule = "low_confidence"
    level: Literal["super"] = "super"

    @property
    def detail(self) -> str:
        return self.level


@dataclass(frozen=True, slots=True)
class Accept(_Remedy):
    """Take the answer as it is, and say how sure the worker was of it."""

    rule = "low_confidence"


@dataclass(frozen=True, slots=True)
class Reflect(_Remedy):
    """Have a light model think about the failure once, and put its note before the next attempt."""

    tier = 2
    rule = "reflection"


@dataclass(frozen=True, slots=True)
class GiveUp(_Remedy):
    """End the task with an honest failure; `noted`: with a note that later tasks can find."""

    tier = 3
    rule = "note"
    why: str
    noted: bool = True

    @property
    def detail(self) -> str:
        return self.why


Remedy: TypeAlias = (
    DoubleTimeout
    | BackOff
    | InstructStricter
    | UseFallbackTool
    | SwitchProvider
    | RetryNow
    | ResolveAgain
    | Compact
    | OfferInstall
    | Escalate
    | Accept
    | Reflect
    | GiveUp
)
