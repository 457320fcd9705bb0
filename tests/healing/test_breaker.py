from __future__ import annotations

import pytest

from skep.healing.breaker import Breakers, Tolerance


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


KEY = "provider:openai"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breakers(clock: Clock) -> Breakers:
    return Breakers(Tolerance(window_s=60, least=4, share=0.5, rest_s=30), now=clock)


def fail(breakers: Breakers, times: int, key: str = KEY) -> None:
    for _ in range(times):
        breakers.failed(key, "server_error")


def test_a_circuit_opens_when_half_of_enough_calls_failed(breakers: Breakers) -> None:
    fail(breakers, 3)
    assert (breakers.state(KEY), breakers.begin(KEY)) == ("closed", True)
    fail(breakers, 1)
    assert (breakers.state(KEY), breakers.is_open(KEY), breakers.begin(KEY)) == ("open", True, False)


def test_calls_that_go_well_keep_it_closed(breakers: Breakers) -> None:
    for _ in range(20):
        breakers.succeeded(KEY)
        breakers.succeeded(KEY)
        breakers.failed(KEY, "timeout")
    assert breakers.state(KEY) == "closed"


def test_what_failed_long_ago_does_not_count(breakers: Breakers, clock: Clock) -> None:
    fail(breakers, 3)
    clock.at += 61
    fail(breakers, 3)
    assert breakers.state(KEY) == "closed"


def test_after_its_rest_one_call_may_try_and_closes_it(breakers: Breakers, clock: Clock) -> None:
    fail(breakers, 4)
    clock.at += 30
    assert (breakers.state(KEY), breakers.is_open(KEY)) == ("half-open", False)
    assert [breakers.begin(KEY), breakers.begin(KEY), breakers.is_open(KEY)] == [True, False, True]
    breakers.succeeded(KEY)
    fail(breakers, 3)
    assert breakers.state(KEY) == "closed"


def test_a_probe_that_fails_opens_it_for_another_rest(breakers: Breakers, clock: Clock) -> None:
    fail(breakers, 4)
    clock.at += 30
    assert breakers.begin(KEY)
    fail(breakers, 1)
    assert breakers.state(KEY) == "open"
    clock.at += 29
    assert breakers.is_open(KEY)
    clock.at += 1
    assert breakers.begin(KEY)


def test_a_probe_that_is_never_heard_of_does_not_keep_it_open_for_ever(breakers: Breakers, clock: Clock) -> None:
    fail(breakers, 4)
    clock.at += 30
    assert breakers.begin(KEY)
    clock.at += 30
    assert breakers.begin(KEY)


def test_a_failure_that_says_nothing_against_it_does_not_count_and_frees_the_probe(
    breakers: Breakers, clock: Clock
) -> None:
    for _ in range(20):
        breakers.failed(KEY, "rate_limit")
        breakers.failed("tool:use_skill", "tool_refused")
    assert breakers.state(KEY) == breakers.state("tool:use_skill") == "closed"
    fail(breakers, 30)
    clock.at += 30
    assert breakers.begin(KEY)
    breakers.failed(KEY, "invalid_output")
    assert breakers.begin(KEY)


def test_each_provider_and_tool_has_its_own(breakers: Breakers) -> None:
    fail(breakers, 4, "provider:anthropic")
    assert breakers.is_open("provider:anthropic")
    assert not breakers.is_open(KEY)
    assert not breakers.is_open("tool:browse")


def test_a_circuit_says_how_long_it_rests(breakers: Breakers, clock: Clock) -> None:
    assert breakers.rests_s(KEY) == 0
    fail(breakers, 4)
    clock.at += 10
    assert breakers.rests_s(KEY) == 20
    clock.at += 20
    assert breakers.rests_s(KEY) == 0
    assert breakers.begin(KEY)
    clock.at += 5
    assert breakers.rests_s(KEY) == 25


def test_circuits_that_have_nothing_to_tell_are_forgotten(breakers: Breakers, clock: Clock) -> None:
    fail(breakers, 4, "tool:a:browse")
    clock.at += 61
    for hive in range(2_000):
        breakers.succeeded(f"tool:{hive}:browse")
    assert breakers.state("tool:a:browse") == "closed"
    fail(breakers, 4)
    clock.at += 20
    for hive in range(2_000):
        breakers.succeeded(f"tool:{hive}:use_skill")
    assert breakers.state(KEY) == "open"
