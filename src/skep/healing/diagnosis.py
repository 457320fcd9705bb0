"""Decide what is done about a failure. Pure: the same failure and history give the same remedy."""

from __future__ import annotations

from skep.healing.failure import Failure
from skep.healing.history import MOST_REMEDIES, History, Options
from skep.healing.remedies import Accept, Escalate, GiveUp, Reflect, Remedy
from skep.healing.rules import RULES, Case
from skep.healing.table import TABLE
from skep.state.events import Healed


def diagnose(failure: Failure, history: History, *, options: Options) -> Remedy:
    """Choose the remedy: the first rule that fits, else one reflection, else an honest end."""
    if failure.kind == "low_confidence":
        return _for_doubt(history, options)
    tiers = TABLE[failure.kind].tiers
    if not options.healing:
        return GiveUp(f"{failure}; self-healing is off for this hive", noted=False)
    if len(history.applied) >= MOST_REMEDIES:
        return GiveUp(f"{failure}; after {MOST_REMEDIES} remedies", noted=3 in tiers)
    case = Case(failure, history, options)
    rule = next((row for row in RULES if row.fits(case)), None)
    if rule is not None:
        return rule.remedy(case)
    if 2 in tiers and options.reflection and not history.reflections:
        return Reflect()
    return GiveUp(str(failure), noted=3 in tiers)


def _for_doubt(history: History, options: Options) -> Remedy:
    """Ask a stronger model once. This is part of answering well, so it does not depend on self-healing."""
    return Escalate() if options.stronger and not history.escalated else Accept()


def healed(failure: Failure, remedy: Remedy, *, attempt: int) -> Healed:
    """Put on record that a failure was met with a remedy."""
    return Healed(
        attempt=attempt,
        failure=failure.kind,
        tier=remedy.tier,
        rule=remedy.rule,
        remedy=remedy.name,
        detail=remedy.detail or failure.message[:300],
    )
