from __future__ import annotations

import pytest

from skep.errors import InvalidRequest
from skep.state.upkeep import USUAL, Upkeep


def test_only_what_was_chosen_is_stored() -> None:
    chosen = USUAL.changed({"threads": "thread", "stop_after_s": 300})
    assert chosen.text() == '{"threads": "thread"}'
    assert Upkeep.read(chosen.text()) == chosen


def test_what_a_newer_skep_has_stored_is_left_alone() -> None:
    assert Upkeep.read('{"stop_after_s": 60, "colour": "green"}') == Upkeep(stop_after_s=60)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", "both"),
        ("threads", True),
        ("stop_after_s", 0),
        ("stop_after_s", -1),
        ("stop_after_s", True),
        ("stop_after_s", "soon"),
        ("archive_after_s", 10**12),
        ("delete_after_days", 1.5),
        ("recreate_missing", 1),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_can(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        USUAL.changed({name: value})
    assert refused.value.hint is not None
