from __future__ import annotations

import pytest

from skep.healing.diagnosis import diagnose, healed
from skep.healing.failure import KINDS, Failure, FailureKind
from skep.healing.history import MOST_REMEDIES, History, Options
from skep.healing.remedies import Accept, BackOff, Compact, Escalate, GiveUp, Reflect, RetryNow
from skep.healing.table import TABLE

REFUSED = Failure("tool_refused", "400: rich text is not allowed", tool="use_skill")


@pytest.mark.parametrize("kind", KINDS)
def test_every_failure_comes_to_an_end(kind: FailureKind) -> None:
    """Whatever fails for ever: remedies run out, and with them at most one reflection."""
    failure = Failure(kind, "again", provider="a", tool="t", fallback="u", packages=("p",))
    history, options = History(), Options(providers=("a", "b"), stronger=True)
    while not isinstance(remedy := diagnose(failure, history, options=options), GiveUp | Accept):
        history = history.after(failure, remedy)
    assert len(history.applied) <= 8
    assert history.reflections == (2 in TABLE[kind].tiers)


def test_a_task_that_gets_on_a_little_each_time_is_not_healed_for_ever() -> None:
    failure, history = Failure("server_error", "500"), History()
    while not isinstance(remedy := diagnose(failure, history, options=Options()), GiveUp):
        history = history.after(failure, remedy).progressed()
    assert len(history.applied) == MOST_REMEDIES
    assert remedy.noted


def test_one_reflection_is_all_that_a_task_gets() -> None:
    first = diagnose(REFUSED, History(), options=Options())
    assert first == Reflect()
    history = History().after(REFUSED, first).progressed()
    assert diagnose(REFUSED, history, options=Options()) == GiveUp(str(REFUSED))
    assert diagnose(Failure("loop", "same_call"), history, options=Options()) == GiveUp("loop: same_call")


def test_without_a_model_that_could_reflect_the_end_is_honest_at_once() -> None:
    assert isinstance(diagnose(REFUSED, History(), options=Options(reflection=False)), GiveUp)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "low_confidence"])
def test_with_healing_off_there_is_one_attempt_and_no_note(kind: FailureKind) -> None:
    remedy = diagnose(Failure(kind, "…", tool="t", packages=("p",)), History(), options=Options(healing=False))
    assert isinstance(remedy, GiveUp)
    assert not remedy.noted
    assert "off" in remedy.why


@pytest.mark.parametrize("healing", [True, False])
def test_doubt_is_taken_to_a_stronger_model_once_with_healing_on_or_off(healing: bool) -> None:
    doubt, options = Failure("low_confidence", "0.3"), Options(healing=healing, stronger=True)
    first = diagnose(doubt, History(), options=options)
    assert first == Escalate("super")
    assert diagnose(doubt, History().after(doubt, first), options=options) == Accept()
    assert diagnose(doubt, History(), options=Options(healing=healing)) == Accept()


def test_nobody_is_told_about_the_failure_of_a_task_that_they_ended() -> None:
    assert diagnose(Failure("cancelled", "by ada"), History(), options=Options()) == GiveUp("cancelled: by ada", False)


def test_a_record_names_tier_rule_and_remedy() -> None:
    limited = Failure("rate_limit", "429", provider="openai")
    event = healed(limited, BackOff(4), attempt=3)
    assert (event.attempt, event.failure, event.tier, event.rule, event.remedy, event.detail) == (
        3,
        "rate_limit",
        1,
        "rate_limit",
        "BackOff",
        "4 s",
    )
    assert healed(limited, RetryNow(), attempt=1).detail == "429"


def test_a_history_tells_what_was_tried_and_which_attempt_runs() -> None:
    limited, long = Failure("rate_limit", "429"), Failure("context_overflow", "…")
    history = History().after(limited, BackOff(2)).after(long, Compact())
    assert history.attempt == 3
    assert history.tried == ("rate_limit: BackOff (2 s)", "context_overflow: Compact")
