"""Events are typed, frozen, and nothing but an event is taken for one."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from skep.errors import Corrupt, InvalidRequest
from skep.state.events import EVENT_TYPES, Event, Failed, Prompted, parse_event, recorded_event


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Prompted(text="as it was").text = "otherwise"  # type: ignore[misc]


def test_untrusted_data_becomes_the_event_its_type_names() -> None:
    assert parse_event({"type": "failed", "error": "E", "message": "m"}) == Failed(error="E", message="m")


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"type": "prompted"}, "text"),
        ({"type": "prompted", "text": 7}, "text"),
        ({"type": "prompted", "text": "a", "mood": "b"}, "mood"),
        ({"type": "prompted", "text": "a", "v": 2}, "v"),
        ({"type": "invented", "text": "a"}, "invented"),
        ({"text": "a"}, "type"),
        ("prompted", "event"),
        (None, "event"),
    ],
)
def test_what_is_not_an_event_is_refused_by_the_name_of_its_fault(data: object, names: str) -> None:
    with pytest.raises(InvalidRequest, match=names) as refusal:
        parse_event(data)
    assert "prompted" in (refusal.value.hint or "")


def test_a_stored_type_that_this_skep_does_not_know_is_not_guessed_at() -> None:
    envelope = {"seq": 4, "hive": "hv-a", "type": "from_the_future", "v": 1, "body": {}}
    with pytest.raises(Corrupt, match="event 4 of hv-a"):
        recorded_event(envelope)


def test_every_type_has_a_name_of_its_own_on_disk() -> None:
    assert len(EVENT_TYPES) == len(get_args(Event))
