"""Every row of the decision table, reached through the wire: a server of models fails, and a task lives with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from tests.journeys.house import House, Outcome, command, descendants, finish, named, skill, until
from tests.models.servers import (
    BAD_ARGUMENTS,
    LONG,
    OVERLOADED,
    RATE_LIMIT,
    SERVER_ERROR,
    Call,
    Cut,
    Endless,
    Fault,
    Malformed,
    Protocol,
    Say,
    Silence,
    Turn,
    overflow,
)

from skep.healing.table import TABLE

WELL = "All is well."
Healed = tuple[str, int, str, str]
RETRY = (1, "transient", "RetryNow")
REFLECT = (2, "reflection", "Reflect")
NOTE = (3, "note", "GiveUp")


@dataclass(frozen=True)
class Case:
    """What the model's server does, and what is made of it; after `turns` the worker finishes.

    Each has more answers than failures, so that no circuit opens over all of them together.
    """

    name: str
    turns: tuple[Turn | Callable[[Protocol], Turn], ...]
    healed: tuple[Healed, ...]
    status: str = "succeeded"


OK = (command("echo 1"), command("echo 2"), command("echo 3"))
BACK_SOON = Fault(503, "later", retry_after="0")
SLEEP = command("sleep 60")
IMPORT = command("python3 -c 'import nowhere'")
#: What comes over the wire, and so is tried with each protocol.
WIRE = [
    Case("rate-limit", (RATE_LIMIT, RATE_LIMIT), (("rate_limit", 1, "rate_limit", "BackOff"),) * 2),
    Case("server-error", (SERVER_ERROR,), (("server_error", *RETRY),)),
    Case("overloaded", (*OK, *(OVERLOADED,) * 3), (("overloaded", *RETRY),)),
    Case("resting", (*OK, *(BACK_SOON,) * 3), (("overloaded", 1, "rate_limit", "BackOff"),)),
    Case("timeout", (Silence(),), (("timeout", *RETRY),)),
    Case("malformed", (Malformed(),), (("malformed", *RETRY),)),
    Case("cut", (Cut(),), (("cut", *RETRY),)),
    Case("overflow", (command("true"), overflow), (("context_overflow", 1, "context_overflow", "Compact"),)),
    Case("too-long", (LONG,), (("too_long", *REFLECT),)),
    Case("arguments", (BAD_ARGUMENTS,) * 3, (("invalid_arguments", *REFLECT),)),
    Case("key", (Fault(401, "no such key"),), (("refused", *NOTE),), "failed"),
]
#: What a worker meets whatever its model speaks.
WORK = [
    Case("slow-tool", (SLEEP,), (("tool_timeout", 1, "tool_timeout", "DoubleTimeout"),)),
    Case("package", (IMPORT,), (("missing_package", 1, "missing_package", "OfferInstall"),)),
    Case("nothing", (skill("find"), skill("look")), (("empty_result", 1, "empty_result", "UseFallbackTool"),)),
    Case("post", (skill("post", "*Hi*"), skill("post", "Hi")), (("tool_refused", *REFLECT),)),
    Case("broken", (skill("broken"),) * 2, (("tool_error", *REFLECT), ("tool_error", *NOTE)), "failed"),
    Case("tool", (Say(calls=(Call("fly", {}),)),) * 3, (("unknown_tool", *REFLECT),)),
    Case("loop", (command("ls"),) * 5, (("loop", *REFLECT),)),
    Case("tired", (finish("I cannot.", outcome="failed"),), (("gave_up", *REFLECT),)),
    Case("doubt", (finish("Maybe.", 0.1),), (("low_confidence", 1, "low_confidence", "Escalate"),)),
    Case("down", (*OK, *(SERVER_ERROR,) * 2), (("server_error", *RETRY), ("server_error", *NOTE)), "failed"),
    Case("twice", (LONG, LONG), (("too_long", *REFLECT), ("too_long", *NOTE)), "failed"),
]


def carry(served: House, protocol: Protocol, case: Case) -> Outcome:
    turns = [turn(protocol) if callable(turn) else turn for turn in case.turns]
    served.narrator.tell(f"case-{case.name}", *turns, finish(WELL))
    return served.ask(f"Do what is to be done in case-{case.name}")


def check(served: House, protocol: Protocol, cases: list[Case]) -> None:
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(zip(cases, pool.map(partial(carry, served, protocol), cases), strict=True))
    assert {case.name: tuple(one.healed) for case, one in outcomes} == {case.name: case.healed for case in cases}
    assert {case.name: one.task["status"] for case, one in outcomes} == {case.name: case.status for case in cases}
    for case, outcome in outcomes:
        assert len(outcome.all("task_ended")) == 1
        if case.status == "succeeded":
            assert outcome.task["reply"] == WELL
            assert not outcome.all("failure_noted")
        else:
            (note,) = outcome.all("failure_noted")
            assert note["signature"].startswith(case.healed[-1][0])
            assert note["root_cause"] in outcome.task["reply"]


def test_each_failure_of_a_model_is_met_as_the_table_says(served: House, protocol: Protocol) -> None:
    check(served, protocol, WIRE)


def test_each_failure_of_the_work_is_met_as_the_table_says(garden: House) -> None:
    check(garden, "openai", WORK)


#: Failures with a journey of their own, below and in the modules beside this one.
ELSEWHERE = {
    "invalid_output",
    "sandbox_lost",
    "sandbox_disabled",
    "circuit_open",
    "limit",
    "denied",
    "cancelled",
    "unknown",
}


def test_every_row_of_the_decision_table_has_a_journey() -> None:
    assert {failure for case in (*WIRE, *WORK) for failure, *_ in case.healed} | ELSEWHERE == set(TABLE)


def test_a_classification_that_does_not_fit_its_schema_is_asked_for_more_strictly(served: House) -> None:
    bad = Say(value={"kind": "perhaps", "why": []})
    story = served.narrator.tell("case-shape", finish(WELL), classify=[bad])
    outcome = served.ask("Do it, case-shape")
    assert outcome.healed == [("invalid_output", 1, "invalid_output", "InstructStricter")]
    assert outcome.task["reply"] == WELL
    assert "could not be used" in story.requests("light")[1].text


def test_what_nobody_approves_is_not_done_and_the_worker_goes_on(garden: House) -> None:
    expose = Say(calls=(Call("expose_port", {"port": 8000}),))
    garden.narrator.tell("case-denied", expose, finish(WELL))
    task = garden.submit("Show it to everybody, case-denied")
    until(lambda: garden.http("GET", f"/api/tasks/{task['id']}").json()["status"] == "asking", "the question")
    assert garden.http("POST", f"/api/tasks/{task['id']}/answer", json={"answer": "no"}).status_code == 200
    outcome = garden.outcome(task)
    assert [one["kind"] for one in outcome.observations] == ["refused"]
    assert (outcome.healed, outcome.task["reply"]) == ([], WELL)


def test_a_task_that_is_ended_by_a_person_is_not_healed(garden: House) -> None:
    garden.narrator.tell("case-cancel", command("sleep 62", timeout_s=60))
    task = garden.submit("Wait, case-cancel")
    assert garden.server is not None
    owner = garden.server.pid
    until(lambda: [one for one in descendants(owner) if named(one) == "sleep"], "the command")
    garden.http("POST", f"/api/tasks/{task['id']}/cancel", json={"why": "enough"})
    outcome = garden.outcome(task)
    assert (outcome.task["status"], outcome.healed, outcome.all("failure_noted")) == ("cancelled", [], [])
    until(lambda: not [one for one in descendants(owner) if named(one) == "sleep"], "the end of the command")


def test_a_reflection_sees_what_was_executed_and_goes_before_the_next_attempt(garden: House) -> None:
    story = garden.narrator.tell(
        "case-reflection", *(command("ls /nowhere"),) * 5, finish(WELL), reflection="Look elsewhere."
    )
    outcome = garden.ask("Look into it, case-reflection")
    (reflected,) = outcome.all("reflected")
    assert reflected["note"] == "Look elsewhere."
    assert "exit code 2: failed" in reflected["check"]
    (asked,) = [one for one in story.received if "<evidence>" in one.text]
    assert "exit code 2: failed" in asked.text
    assert asked.model.startswith("light")
    assert "<reflection>\\nLook elsewhere.\\n</reflection>" in story.requests("normal")[-1].text


def test_a_sandbox_that_dies_is_resolved_anew_and_the_task_goes_on(garden: House) -> None:
    garden.narrator.tell("case-lost", command("sleep 61", timeout_s=50), command("echo back"), finish(WELL))
    task = garden.submit("Go on whatever happens, case-lost")
    assert garden.server is not None
    owner = garden.server.pid
    sleeping = until(lambda: [one for one in descendants(owner) if named(one) == "sleep"], "the command")
    os.kill(_sandbox_of(sleeping[0]), signal.SIGKILL)
    outcome = garden.outcome(task)
    assert outcome.healed == [("sandbox_lost", 1, "sandbox_lost", "ResolveAgain")]
    assert outcome.task["reply"] == WELL
    assert "back\n" in [one.get("stdout") for one in outcome.observations]


def _sandbox_of(pid: int) -> int:
    """Return the process that is the first one inside the sandbox of another."""
    while True:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":\t", 1) for line in file)
        if fields["NSpid"].split()[-1] == "1":
            return pid
        pid = int(fields["PPid"])


def test_an_endless_answer_comes_to_an_end(garden: House) -> None:
    garden.narrator.tell("case-endless", Endless("and so on " * 200, 0), finish(WELL))
    outcome = garden.ask("Say it all, case-endless")
    assert [one[0] for one in outcome.healed] in (["too_long"], ["timeout"])
    assert outcome.task["reply"] == WELL


def test_a_limit_ends_in_what_there_is_by_then(garden: House) -> None:
    steps = [command(f"echo {number}") for number in range(20)]
    garden.narrator.tell("case-limit", *steps)
    outcome = garden.ask("Count for ever, case-limit")
    assert outcome.task["partial"]
    assert len(outcome.observations) == 8
    assert outcome.task["reply"]
