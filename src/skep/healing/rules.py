"""Tier 1: rules that need no model. The first row that fits decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from skep.healing.failure import Failure, FailureKind
from skep.healing.history import History, Options
from skep.healing.remedies import (
    BackOff,
    Compact,
    DoubleTimeout,
    InstructStricter,
    OfferInstall,
    Remedy,
    ResolveAgain,
    RetryNow,
    SwitchProvider,
    UseFallbackTool,
)

#: How often the same may be tried in a row, before a step has gone well.
BACK_OFFS = 6
RESOLVES = 2
COMPACTIONS = 2
LONGEST_BACK_OFF_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """A failure, with all that a rule may look at."""

    failure: Failure
    history: History
    options: Options

    @property
    def tool(self) -> str:
        return self.failure.tool or ""

    @property
    def wait_s(self) -> float:
        """How long to leave a provider alone: as long as it asks for, else ever longer."""
        if self.failure.retry_after_s is not None:
            return max(0.0, self.failure.retry_after_s)
        return min(LONGEST_BACK_OFF_S, 2.0 ** self.history.lately(BackOff))

    @property
    def other_provider(self) -> str | None:
        """The best provider that is neither the one that failed nor one that is avoided already."""
        out = {self.failure.provider, *self.history.avoided}
        return next((one for one in self.options.providers if one not in out), None)


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: for failures of these kinds, and where it holds, the remedy. `means` is the row in words."""

    name: str
    kinds: tuple[FailureKind, ...]
    means: str
    when: Callable[[Case], bool]
    remedy: Callable[[Case], Remedy]

    def fits(self, case: Case) -> bool:
        return case.failure.kind in self.kinds and self.when(case)


def _in_time(case: Case) -> bool:
    return case.options.seconds_left is None or case.wait_s < case.options.seconds_left


def _wants_rest(case: Case) -> bool:
    """Tell what waiting helps against: a limited rate, and whatever says when it ends and has no stand-in."""
    match case.failure.kind:
        case "rate_limit":
            return True
        case "circuit_open":
            return case.failure.retry_after_s is not None and case.other_provider is None
        case _:
            return case.failure.retry_after_s is not None


def _switch(case: Case) -> SwitchProvider:
    return SwitchProvider(avoid=cast(str, case.failure.provider), use=cast(str, case.other_provider))


def _stricter(case: Case) -> InstructStricter:
    return InstructStricter(
        "Your last answer could not be used: "
        f"{' '.join(case.failure.message.split())[:600]}\n"
        "Answer with one JSON value that has exactly the form asked for: no text before or after it, no code fence, "
        "no field that is not in the schema, none left out."
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "tool_timeout",
        ("tool_timeout",),
        "the first time that a tool runs out of time: double that tool's timeout",
        lambda case: bool(case.tool) and case.tool not in case.history.doubled,
        lambda case: DoubleTimeout(case.tool),
    ),
    Rule(
        "rate_limit",
        ("rate_limit", "overloaded", "circuit_open"),
        "a rate limit, an overload that says when it ends, or an open circuit of the only provider, up to 6 times in a "
        "row and within the task's time: wait as long as Retry-After says, else min(60, 2^n) s",
        lambda case: _wants_rest(case) and case.history.lately(BackOff) < BACK_OFFS and _in_time(case),
        lambda case: BackOff(case.wait_s),
    ),
    Rule(
        "invalid_output",
        ("invalid_output",),
        "structured output that does not fit its schema, once in a row: a stricter instruction with the schema's error",
        lambda case: not case.history.lately(InstructStricter),
        _stricter,
    ),
    Rule(
        "empty_result",
        ("empty_result",),
        "a tool that comes back with nothing and has a fallback that was not used yet: the fallback",
        lambda case: case.failure.fallback not in {None, *case.history.stood_in},
        lambda case: UseFallbackTool(case.tool, instead=cast(str, case.failure.fallback)),
    ),
    Rule(
        "circuit_open",
        ("circuit_open",),
        "a provider whose circuit is open, with another one configured: switch to that",
        lambda case: case.failure.provider not in {None, *case.history.avoided} and case.other_provider is not None,
        _switch,
    ),
    Rule(
        "transient",
        ("server_error", "overloaded", "timeout", "cut", "malformed"),
        "an answer of 5xx, none in time, or a broken one, once in a row: try again at once",
        lambda case: not case.history.lately(RetryNow),
        lambda _: RetryNow(),
    ),
    Rule(
        "sandbox_lost",
        ("sandbox_lost",),
        "a sandbox that died, up to twice in a row: resolve the session anew and try again",
        lambda case: case.history.lately(ResolveAgain) < RESOLVES,
        lambda _: ResolveAgain(),
    ),
    Rule(
        "context_overflow",
        ("context_overflow",),
        "a conversation that no longer fits the model, up to twice in a row: make it shorter and go on",
        lambda case: case.history.lately(Compact) < COMPACTIONS,
        lambda _: Compact(),
    ),
    Rule(
        "missing_package",
        ("missing_package",),
        "a package that is not installed, the first time: name the call of install_packages that installs it",
        lambda case: bool(set(case.failure.packages) - case.history.offered),
        lambda case: OfferInstall(case.failure.packages, case.failure.ecosystem),
    ),
)
