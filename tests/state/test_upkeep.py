from __future__ import annotations

import pytest

from skep.errors import InvalidRequest
from skep.sandbox import mechanisms
from skep.state import upkeep
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
        ("sandbox_mechanism", "magic"),
        ("sandbox_mechanism", "disabled"),
        ("sandbox_fallback", "docker"),
        ("sandbox_fallback", ["magic"]),
        ("sandbox_fallback", ["docker", "docker"]),
        ("sandbox_isolation", "total"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_can(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        USUAL.changed({name: value})
    assert refused.value.hint is not None


def test_what_isolates_the_sandboxes_of_a_hive_is_kept_with_it() -> None:
    chosen = USUAL.changed(
        {"sandbox_mechanism": "docker", "sandbox_fallback": ["gvisor"], "sandbox_isolation": "kernel"}
    )
    assert Upkeep.read(chosen.text()) == chosen
    assert chosen.sandbox_fallback == ("gvisor",)
    assert chosen.since(USUAL)["sandbox_fallback"] == ["gvisor"]
    assert chosen.changed({"sandbox_mechanism": None, "sandbox_fallback": None, "sandbox_isolation": None}) == USUAL


def test_state_knows_the_same_mechanisms_and_levels_as_the_sandbox() -> None:
    assert set(upkeep.MECHANISMS) == set(mechanisms.MECHANISMS)
    assert upkeep.ISOLATION == mechanisms.LEVELS
