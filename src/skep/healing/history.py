"""What a task has been through so far, and what there is to heal it with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from skep.healing.failure import Failure
from skep.healing.remedies import (
    DoubleTimeout,
    Escalate,
    OfferInstall,
    Reflect,
    Remedy,
    SwitchProvider,
    UseFallbackTool,
)

R = TypeVar("R", bound=Remedy)

#: Failures that one task is healed of, all in all: what goes on for longer is not getting better.
MOST_REMEDIES = 20


@dataclass(frozen=True, slots=True)
class Applied:
    """A failure, and the remedy that it was met with."""

    failure: Failure
    remedy: Remedy

    def __str__(self) -> str:
        """Say it in one line, for people and for a model."""
        detail = f" ({self.remedy.detail})" if self.remedy.detail else ""
        return f"{self.failure.kind}: {self.remedy.name}{detail}"


@dataclass(frozen=True, slots=True)
class History:
    """The failures and remedies of one task, oldest first. It only grows: a replayed task comes to the same one."""

    applied: tuple[Applied, ...] = ()
    #: How many of them lie before the last step that went well.
    settled: int = 0

    @property
    def attempt(self) -> int:
        """The number of the attempt that runs now, from 1."""
        return len(self.applied) + 1

    def after(self, failure: Failure, remedy: Remedy) -> History:
        """Return the history with one more failure and its remedy."""
        return replace(self, applied=(*self.applied, Applied(failure, remedy)))

    def progressed(self) -> History:
        """Return the history after a step that went well: what may be done once in a row may be done again."""
        return replace(self, settled=len(self.applied))

    def all(self, remedy: type[R]) -> tuple[R, ...]:
        """Return the remedies of a kind that were applied so far."""
        return tuple(one.remedy for one in self.applied if isinstance(one.remedy, remedy))

    def lately(self, remedy: type[Remedy]) -> int:
        """Count the remedies of a kind that were applied since a step went well."""
        return sum(isinstance(one.remedy, remedy) for one in self.applied[self.settled :])

    @property
    def reflections(self) -> int:
        return len(self.all(Reflect))

    @property
    def escalated(self) -> bool:
        return bool(self.all(Escalate))

    @property
    def doubled(self) -> frozenset[str]:
        """The tools whose timeout was doubled."""
        return frozenset(one.tool for one in self.all(DoubleTimeout))

    @property
    def stood_in(self) -> frozenset[str]:
        """The fallbacks that were used."""
        return frozenset(one.instead for one in self.all(UseFallbackTool))

    @property
    def avoided(self) -> frozenset[str]:
        """The providers that are not asked any more."""
        return frozenset(one.avoid for one in self.all(SwitchProvider))

    @property
    def offered(self) -> frozenset[str]:
        """The packages whose installation was offered."""
        return frozenset(package for one in self.all(OfferInstall) for package in one.packages)

    @property
    def tried(self) -> tuple[str, ...]:
        """What was tried, one line each."""
        return tuple(str(one) for one in self.applied)


@dataclass(frozen=True, slots=True)
class Options:
    """What there is to heal a task with."""

    #: Whether the hive has self-healing in effect. Without it only confidence is escalated.
    healing: bool = True
    #: The providers that are configured, best first.
    providers: tuple[str, ...] = ()
    #: Whether a model can be asked to reflect, and whether there is a stronger one than the one in use.
    reflection: bool = True
    stronger: bool = False
    #: What is left of the task's time, without an end if None.
    seconds_left: float | None = None
