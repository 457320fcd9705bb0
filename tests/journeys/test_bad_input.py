"""What nobody should send, and no model should answer: clear errors, nothing lost, nothing leaked."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest
from tests.journeys.house import House, command, finish
from tests.models.servers import RATE_LIMIT, SERVER_ERROR, Cut, Fault, Hangup, Turn

from skep.gateway.tokens import Tokens
from skep.state.flags import DEFAULT

FAULTS: tuple[Turn, ...] = (RATE_LIMIT, SERVER_ERROR, Cut())


def test_faults_in_any_order_end_in_one_honest_state(garden: House) -> None:
    def ask(number: int, faults: tuple[Turn, ...]) -> None:
        good = [command(f"echo {step}") for step in range(3)]  # so that no circuit opens
        garden.narrator.tell(f"case-order-{number}", *good, *faults, finish("All is well."))
        outcome = garden.ask(f"Get through, case-order-{number}")
        assert outcome.task["status"] in ("succeeded", "failed")
        assert outcome.task["reply"]
        assert len(outcome.all("task_ended")) == 1
        assert len(outcome.healed) in (2, 3)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, range(6), permutations(FAULTS)))


def test_a_provider_that_says_the_key_back_does_not_leak_it(served: House, protocol: str) -> None:
    key = f"sk-secret-{protocol}"
    served.narrator.tell("case-echo", Fault(401, f"the key {key} is wrong"))
    outcome = served.ask("Be careful, case-echo")
    assert outcome.task["status"] == "failed"
    assert key not in str(outcome)
    assert key not in (served.home / "serve.log").read_text()


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("", "empty"), (" \n\t", "empty"), ("a\x00b", "character"), ("\x1b[2J", "character"), ("x" * (1 << 20), "bytes")],
    ids=["empty", "blank", "nul", "escape", "1 MB"],
)
def test_a_prompt_that_cannot_be_worked_on_is_refused_with_the_reason(garden: House, prompt: str, said: str) -> None:
    answer = garden.http("POST", "/api/hives/garden/prompt", json={"prompt": prompt})
    assert answer.status_code in (400, 413)
    assert said in answer.json()["message"]
    assert answer.json()["hint"]


def test_an_unknown_hive_is_not_found(garden: House) -> None:
    for hive, status in (("meadow", 404), ("hv-aaaaaaaaaaaaaaaa", 404), ("%2e%2e", 400), ("a%00b", 400)):
        assert garden.http("POST", f"/api/hives/{hive}/prompt", json={"prompt": "Hello"}).status_code == status


def test_a_token_of_another_account_sees_nothing_of_this_one(garden: House) -> None:
    asyncio.run(garden.settle({"acme/garden": DEFAULT}))
    token = Tokens(garden.home / ".local/share/skep/keys").of("acme")
    garden.narrator.tell("case-mine", finish("All is well."))
    task = garden.ask("Keep this to yourself, case-mine").task
    missing = task["id"][:-4] + "aaaa"
    for path in ("", "/events", "/steps"):
        theirs = garden.http("GET", f"/api/tasks/{task['id']}{path}", token=token)
        nobodys = garden.http("GET", f"/api/tasks/{missing}{path}", token=token)
        assert (theirs.status_code, nobodys.status_code) == (404, 404)
        assert theirs.text.replace(task["id"], "…") == nobodys.text.replace(missing, "…")
        assert garden.http("GET", f"/api/tasks/{task['id']}{path}").status_code == 200
    assert garden.http("POST", f"/api/tasks/{task['id']}/cancel", token=token).status_code == 404
    assert garden.http("GET", "/api/tasks", token=token).json() == []
    assert (
        garden.http("POST", f"/api/hives/{task['hive']}/prompt", token=token, json={"prompt": "Hi"}).status_code == 404
    )


def test_a_server_that_hangs_up_is_asked_again(garden: House) -> None:
    garden.narrator.tell("case-hangup", Hangup(), finish("All is well."))
    outcome = garden.ask("Call again, case-hangup")
    assert outcome.task["status"] == "succeeded"
    assert outcome.healed == [("cut", 1, "transient", "RetryNow")]
