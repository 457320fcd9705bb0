"""A person types `skep run`: no server, one process, and a model at the other end of a wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.journeys.house import House, command, finish, house
from tests.models.servers import RATE_LIMIT, SERVER_ERROR, Protocol

from skep.healing.breaker import USUAL


@pytest.fixture
def alone(protocol: Protocol, tmp_path: Path) -> Iterator[House]:
    """A home that nobody serves."""
    with house(tmp_path, protocol) as made:
        yield made


def test_a_task_is_carried_through_failures_to_its_reply(alone: House, protocol: Protocol) -> None:
    story = alone.narrator.tell("case-run", RATE_LIMIT, command("echo 6 x 7 > sum"), SERVER_ERROR, finish("It is 42."))
    ran = alone.skep("run", "What is 6 x 7? case-run", "--hive", "garden")
    assert (ran.returncode, ran.stdout) == (0, "It is 42.\n"), ran.stderr
    for part in ("echo 6 x 7 > sum", "rate_limit", "BackOff", "server_error", "RetryNow", "succeeded"):
        assert part in ran.stderr
    assert {one.protocol for one in story.received} == {protocol}
    assert all(one.streaming for one in story.received)


def test_a_task_that_cannot_be_done_says_so_to_programs_too(tmp_path: Path) -> None:
    with house(tmp_path, chat_models=[{"provider": "rehearsal", "id": "broken.yaml"}]) as scripted:
        (tmp_path / ".config/skep/broken.yaml").write_text("turns: 7\n")
        ran = scripted.skep("run", "Try it, case-nobody", "--hive", "garden", "--json")
    assert ran.returncode == 1, ran.stderr
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    assert events[0]["type"] == "prompted"
    assert [one["type"] for one in events].count("task_ended") == 1
    (healed,) = [one["body"] for one in events if one["type"] == "healed"]
    assert (healed["failure"], healed["tier"]) == ("unknown", 3)
    (note,) = [one["body"] for one in events if one["type"] == "failure_noted"]
    assert "broken.yaml" in note["root_cause"]


@pytest.fixture
def both(tmp_path: Path) -> Iterator[House]:
    """A home with two providers, served."""
    with house(tmp_path, "openai", "anthropic") as made, made.serving():
        yield made


def test_a_provider_whose_circuit_is_open_gives_way_to_another(both: House) -> None:
    for number in range(USUAL.least):
        story = both.narrator.tell(f"case-switch-{number}", finish("All is well."), broken="openai")
        outcome = both.ask(f"Go on, case-switch-{number}")
        if outcome.task["status"] == "succeeded":
            break
    assert ("circuit_open", 1, "circuit_open", "SwitchProvider") in outcome.healed
    assert outcome.task["reply"] == "All is well."
    assert story.received[-1].protocol == "anthropic"
    again = both.narrator.tell("case-switched", finish("All is well."))
    assert both.ask("Go on, case-switched").task["status"] == "succeeded"
    assert {one.protocol for one in again.received} == {"anthropic"}
