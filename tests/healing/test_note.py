from __future__ import annotations

import pytest

from skep.healing.failure import KINDS, Failure, FailureKind
from skep.healing.history import History
from skep.healing.note import signature, write_note
from skep.healing.remedies import BackOff, Reflect

REFUSED = Failure("tool_refused", "400: rich text\nis not allowed", tool="use_skill")
PAST = History().after(Failure("rate_limit", "429"), BackOff(2)).after(REFUSED, Reflect())


def test_a_note_has_all_that_later_tasks_need() -> None:
    event = write_note(REFUSED, PAST, reflection="Send plain text.").event()
    assert event.signature == "tool_refused use_skill: 400: rich text is not allowed"
    assert event.tried == ("rate_limit: BackOff (2 s)", "tool_refused: Reflect")
    assert event.reflection == "Send plain text."
    assert "rich text is not allowed" in event.root_cause
    assert event.guidance


def test_the_person_is_told_what_failed_what_was_tried_and_what_to_do() -> None:
    reply = write_note(REFUSED, PAST, reflection="Send plain text.").reply()
    for part in (
        "could not",
        "rich text is not allowed",
        "BackOff (2 s)",
        "Send plain text.",
        "Read the tool's answer",
    ):
        assert part in reply
    assert "nothing" in write_note(REFUSED, History()).reply()


@pytest.mark.parametrize("kind", KINDS)
def test_each_failure_has_a_cause_and_a_way_on(kind: FailureKind) -> None:
    note = write_note(Failure(kind, "…"), History())
    assert note.root_cause.endswith("(…)")
    assert note.guidance.endswith(".")
    assert note.signature.startswith(kind)


def test_failures_of_one_sort_have_one_signature() -> None:
    def of(message: str) -> str:
        return signature(Failure("tool_error", message, tool="run_command"))

    assert of("No space on /tmp/ab12/cd, request req_9f3, 1700000123") == of(
        "no space on /var/x/y, request req_1 , 99999"
    ).replace(" ,", ",")
    assert of("status 400") != of("status 500")
    assert len(of("word " * 1000)) < 200


def test_a_very_long_message_is_cut() -> None:
    assert len(write_note(Failure("unknown", "x" * 1_000_000), History()).root_cause) < 1200


def test_advice_of_whoever_raised_the_error_comes_before_that_of_the_table() -> None:
    failure = Failure("unknown", "no model is configured", hint="add one to chat_models in config.json")
    assert write_note(failure, History()).guidance == "Add one to chat_models in config.json."
