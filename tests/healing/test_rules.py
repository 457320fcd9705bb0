"""Tier 1: each row of the table of rules has a case in which it decides and one in which it steps aside."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tests.healing.branches import missed

from skep.healing import diagnosis, rules
from skep.healing.diagnosis import diagnose, healed
from skep.healing.failure import KINDS, Failure, FailureKind
from skep.healing.history import MOST_REMEDIES, History, Options
from skep.healing.remedies import (
    BackOff,
    Compact,
    DoubleTimeout,
    Escalate,
    GiveUp,
    InstructStricter,
    OfferInstall,
    Reflect,
    Remedy,
    ResolveAgain,
    RetryNow,
    SwitchProvider,
    UseFallbackTool,
)
from skep.healing.rules import BACK_OFFS, RULES, Case
from skep.healing.table import TABLE

NEW, ALONE = History(), Options()
TWO = Options(providers=("openai", "anthropic"))


def after(failure: Failure, *remedies: Remedy) -> History:
    history = NEW
    for remedy in remedies:
        history = history.after(failure, remedy)
    return history


SLOW = Failure("tool_timeout", "no answer in 60 s", tool="run_command")
LIMITED = Failure("rate_limit", "429", provider="openai")
TOLD = Failure("rate_limit", "429", provider="openai", retry_after_s=7.5)
RESTING = Failure("overloaded", "503", provider="openai", retry_after_s=3)
BUSY = Failure("overloaded", "529", provider="anthropic")
SHAPELESS = Failure("invalid_output", "`tasks` is missing", provider="openai")
EMPTY = Failure("empty_result", "nothing", tool="browse", fallback="run_command")
RESTS = Failure("circuit_open", "openai failed 5 times", provider="openai", retry_after_s=12)
OPEN = Failure("circuit_open", "openai failed 5 times", provider="openai")
BROKEN = Failure("server_error", "500", provider="openai")
LOST = Failure("sandbox_lost", "killed")
LONG = Failure("context_overflow", "210000 tokens", provider="openai")
LACKING = Failure("missing_package", "No module named 'yaml'", tool="run_python", packages=("pyyaml",))


@dataclass(frozen=True)
class Row:
    rule: str
    failure: Failure
    remedy: Remedy
    #: Where the same failure meets the end of the rule, and what decides then.
    exhausted: History
    then: type[Remedy]
    options: Options = ALONE


ROWS = [
    Row("tool_timeout", SLOW, DoubleTimeout("run_command"), after(SLOW, DoubleTimeout("run_command")), Reflect),
    Row("rate_limit", LIMITED, BackOff(1), after(LIMITED, *[BackOff(1)] * BACK_OFFS), GiveUp),
    Row("rate_limit", TOLD, BackOff(7.5), after(TOLD, *[BackOff(7.5)] * BACK_OFFS), GiveUp),
    Row("rate_limit", RESTING, BackOff(3), after(RESTING, *[BackOff(3)] * BACK_OFFS, RetryNow()), GiveUp),
    Row(
        "empty_result",
        EMPTY,
        UseFallbackTool("browse", "run_command"),
        after(EMPTY, UseFallbackTool("browse", "run_command")),
        Reflect,
    ),
    Row(
        "circuit_open",
        OPEN,
        SwitchProvider("openai", "anthropic"),
        after(OPEN, SwitchProvider("anthropic", "openai")),
        Reflect,
        TWO,
    ),
    Row("rate_limit", RESTS, BackOff(12), after(RESTS, *[BackOff(12)] * BACK_OFFS), Reflect),
    Row("transient", BROKEN, RetryNow(), after(BROKEN, RetryNow()), GiveUp),
    Row("transient", BUSY, RetryNow(), after(BUSY, RetryNow()), GiveUp),
    Row("sandbox_lost", LOST, ResolveAgain(), after(LOST, ResolveAgain(), ResolveAgain()), GiveUp),
    Row("context_overflow", LONG, Compact(), after(LONG, Compact(), Compact()), GiveUp),
    Row("missing_package", LACKING, OfferInstall(("pyyaml",)), after(LACKING, OfferInstall(("pyyaml",))), Reflect),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.rule}-{row.failure.kind}")
def test_each_row_gives_its_remedy_and_steps_aside_when_that_was_tried(row: Row) -> None:
    remedy = diagnose(row.failure, NEW, options=row.options)
    assert (remedy, remedy.rule, remedy.tier) == (row.remedy, row.rule, 1)
    assert isinstance(diagnose(row.failure, row.exhausted, options=row.options), row.then)


def test_a_stricter_instruction_says_what_was_wrong_once() -> None:
    remedy = diagnose(SHAPELESS, NEW, options=ALONE)
    assert isinstance(remedy, InstructStricter)
    assert "`tasks` is missing" in remedy.text
    assert remedy.rule == "invalid_output"
    assert diagnose(SHAPELESS, after(SHAPELESS, remedy), options=ALONE) == Reflect()


def test_the_rows_come_in_the_order_of_the_table_and_each_is_tested() -> None:
    names = [rule.name for rule in RULES]
    assert names == [
        "tool_timeout",
        "rate_limit",
        "invalid_output",
        "empty_result",
        "circuit_open",
        "transient",
        "sandbox_lost",
        "context_overflow",
        "missing_package",
    ]
    assert {row.rule for row in ROWS} | {"invalid_output"} == set(names)


@pytest.mark.parametrize("kind", KINDS)
def test_rules_and_table_agree_about_which_failures_have_a_rule(kind: FailureKind) -> None:
    has_rule = any(kind in rule.kinds for rule in RULES) or kind == "low_confidence"
    assert has_rule == (1 in TABLE[kind].tiers)


FACTS = [
    Failure(kind, "…", provider=provider, tool=tool, retry_after_s=wait, fallback=fallback, packages=packages)
    for kind in KINDS
    for provider, tool in (("openai", None), (None, "browse"), (None, None))
    for wait in (None, 0.0, 90.0)
    for fallback, packages in ((None, ()), ("run_command", ("pyyaml",)))
]
PASTS = [
    NEW,
    *(after(LOST, *([one] * BACK_OFFS)) for one in (BackOff(1), ResolveAgain(), RetryNow(), Compact())),
    after(SHAPELESS, InstructStricter("…"), DoubleTimeout("browse"), UseFallbackTool("browse", "run_command")),
    after(LACKING, OfferInstall(("pyyaml",)), SwitchProvider("anthropic", "openai"), Reflect()),
    after(LOST, *[RetryNow()] * MOST_REMEDIES),
    after(Failure("low_confidence", "0.1"), Escalate()),
]
MEANS = [
    ALONE,
    TWO,
    Options(seconds_left=30, stronger=True),
    Options(providers=("openai",), reflection=False),
    Options(healing=False),
]


def diagnose_everything() -> None:
    for failure in FACTS:
        for history in PASTS:
            for options in MEANS:
                healed(failure, diagnose(failure, history, options=options), attempt=history.attempt)


def test_every_branch_of_the_rules_and_of_the_diagnosis_is_taken() -> None:
    assert missed(rules, diagnose_everything) == []
    assert missed(diagnosis, diagnose_everything) == []


def test_a_branch_that_is_not_taken_is_found() -> None:
    assert missed(diagnosis, lambda: diagnose(LIMITED, NEW, options=ALONE)) != []


def test_every_rule_fits_some_case_and_not_every_case_of_its_kinds() -> None:
    seen: dict[str, set[bool]] = {rule.name: set() for rule in RULES}
    for failure in FACTS:
        for history in PASTS:
            for options in MEANS:
                for rule in RULES:
                    if failure.kind in rule.kinds:
                        seen[rule.name].add(rule.fits(Case(failure, history, options)))
    assert seen == {rule.name: {True, False} for rule in RULES}


@pytest.mark.parametrize("options", MEANS, ids=str)
def test_every_failure_has_a_remedy_of_a_tier_that_its_row_allows(options: Options) -> None:
    for failure in FACTS:
        for history in PASTS:
            remedy = diagnose(failure, history, options=options)
            assert remedy.tier in TABLE[failure.kind].tiers or isinstance(remedy, GiveUp)


def test_back_off_doubles_up_to_a_minute_and_starts_anew_after_progress() -> None:
    history, waits = NEW, []
    for _ in range(BACK_OFFS):
        remedy = diagnose(LIMITED, history, options=ALONE)
        assert isinstance(remedy, BackOff)
        waits.append(remedy.seconds)
        history = history.after(LIMITED, remedy)
    assert waits == [1, 2, 4, 8, 16, 32]
    assert diagnose(LIMITED, history.progressed(), options=ALONE) == BackOff(1)
    assert Case(LIMITED, after(LIMITED, *[BackOff(1)] * 9), ALONE).wait_s == 60


def test_a_wait_longer_than_the_time_that_is_left_is_not_begun() -> None:
    assert diagnose(TOLD, NEW, options=Options(seconds_left=8)) == BackOff(7.5)
    assert isinstance(diagnose(TOLD, NEW, options=Options(seconds_left=7)), GiveUp)
    assert diagnose(Failure("rate_limit", "", retry_after_s=-3), NEW, options=ALONE) == BackOff(0)


def test_a_timeout_is_doubled_once_for_each_tool() -> None:
    other = Failure("tool_timeout", "…", tool="browse")
    history = after(SLOW, DoubleTimeout("run_command")).progressed()
    assert diagnose(SLOW, history, options=ALONE) == Reflect()
    assert diagnose(other, history, options=ALONE) == DoubleTimeout("browse")


def test_an_open_circuit_is_waited_for_only_where_nobody_else_can_be_asked() -> None:
    assert diagnose(RESTS, NEW, options=TWO) == SwitchProvider("openai", "anthropic")
    assert diagnose(RESTS, NEW, options=Options(providers=("openai",))) == BackOff(12)
    assert diagnose(RESTS, NEW, options=Options(providers=("openai",), seconds_left=10)) == Reflect()


def test_a_switch_goes_to_no_provider_that_is_avoided() -> None:
    three = Options(providers=("openai", "anthropic", "google"))
    history = after(OPEN, SwitchProvider("anthropic", "openai"))
    assert diagnose(OPEN, history, options=three) == SwitchProvider("openai", "google")
    assert diagnose(OPEN, NEW, options=Options(providers=("openai",))) == Reflect()
    assert diagnose(Failure("circuit_open", "…", tool="browse"), NEW, options=three) == Reflect()
