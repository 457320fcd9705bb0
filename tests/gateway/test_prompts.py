"""A prompt that comes in over HTTP is carried to its reply, and can be looked at, ended, answered and run again."""

from __future__ import annotations

import httpx
from tests.gateway.served import DEADLINE_S, Served, eventually, runs

PROMPT = "/api/hives/garden/prompt"


def ask(client: httpx.Client, prompt: str, wait: float = 0) -> dict[str, object]:
    answered = client.post(f"{PROMPT}?wait={wait}", json={"prompt": prompt, "thread": f"api:{prompt[:40]}"})
    assert answered.status_code == (200 if wait else 202), answered.text
    found: dict[str, object] = answered.json()
    return found


def show(client: httpx.Client, task: dict[str, object]) -> dict[str, object]:
    found: dict[str, object] = client.get(f"/api/tasks/{task['id']}").json()
    return found


def act(client: httpx.Client, task: dict[str, object], what: str, **body: object) -> dict[str, object]:
    answered = client.post(f"/api/tasks/{task['id']}/{what}", json=body or None)
    assert answered.is_success, answered.text
    found: dict[str, object] = answered.json()
    return found


def test_a_prompt_that_is_waited_for_comes_back_with_its_reply(client: httpx.Client) -> None:
    task = ask(client, "count the lines", wait=DEADLINE_S)
    assert (task["status"], task["reply"], task["scripted"]) == ("succeeded", "three lines", True)


def test_a_prompt_is_accepted_at_once_and_found_where_it_says(client: httpx.Client) -> None:
    answered = client.post(PROMPT, json={"prompt": "hello", "thread": "api:once"})
    assert answered.status_code == 202
    where = answered.headers["Location"]
    ended = client.get(f"{where}?wait={DEADLINE_S}").json()
    assert (ended["status"], ended["reply"]) == ("succeeded", "You said: hello")


def test_the_same_idempotency_key_makes_one_task(client: httpx.Client) -> None:
    headers = {"Idempotency-Key": "one-of-a-kind"}
    tasks = [client.post(PROMPT, json={"prompt": "hello"}, headers=headers).json()["id"] for _ in range(3)]
    assert len(set(tasks)) == 1


def test_a_cancelled_task_takes_its_command_along(client: httpx.Client) -> None:
    task = ask(client, "sleep 300.25")
    eventually(lambda: runs("sleep", "300.25"), "the command runs")
    act(client, task, "cancel", why="morning")
    ended = client.get(f"/api/tasks/{task['id']}?wait={DEADLINE_S}").json()
    assert (ended["status"], ended["error"]) == ("cancelled", "morning")
    assert not runs("sleep", "300.25")


def test_a_question_is_answered_over_http(client: httpx.Client) -> None:
    task = ask(client, "ask me")
    eventually(lambda: show(client, task)["status"] == "asking", "it asks")
    act(client, task, "answer", answer="blue")
    ended = client.get(f"/api/tasks/{task['id']}?wait={DEADLINE_S}").json()
    assert ended["status"] == "succeeded"
    assert "blue" in ended["reply"]
    assert client.post(f"/api/tasks/{task['id']}/answer", json={"answer": "red"}).status_code == 409


def test_an_ended_task_is_run_again_from_the_beginning_or_from_a_step(client: httpx.Client) -> None:
    task = ask(client, "count again", wait=DEADLINE_S)
    steps = client.get(f"/api/tasks/{task['id']}/steps").json()
    assert steps and {step["status"] for step in steps} == {"done"}
    retried = act(client, task, "retry")
    forked = act(client, task, "fork", step=steps[-1]["number"])
    for again in (retried, forked):
        ended = client.get(f"/api/tasks/{again['id']}?wait={DEADLINE_S}").json()
        assert (ended["status"], ended["reply"], ended["origin"]) == ("succeeded", "three lines", task["id"])
    assert client.post(f"/api/tasks/{task['id']}/fork", json={"step": 9999}).status_code == 400


def test_tasks_are_listed_by_hive_and_status(client: httpx.Client, stranger: httpx.Client) -> None:
    task = ask(client, "list me", wait=DEADLINE_S)
    found = client.get("/api/tasks", params={"hive": "garden", "status": "succeeded", "limit": 500}).json()
    assert task["id"] in [one["id"] for one in found]
    assert {one["status"] for one in found} == {"succeeded"}
    assert client.get("/api/tasks", params={"status": "running-late"}).status_code == 400
    assert stranger.get("/api/tasks").json() == []


def test_the_server_says_that_it_lives_and_can_work(served: Served) -> None:
    with served.client() as nobody:
        assert nobody.get("/healthz").json() == {"status": "ok"}
        assert nobody.head("/healthz").status_code == 200
        assert nobody.get("/readyz").json() == {
            "ready": True,
            "checks": {"database": "ok", "worker": "ok", "sessions": "ok"},
        }
        assert nobody.get("/api/openapi.json").json()["info"]["title"] == "Skep"


def test_a_server_whose_database_is_taken_away_lives_and_is_not_ready(served: Served) -> None:
    file = served.home.state / "skep.db"
    aside = file.rename(file.with_name("aside.db"))
    try:
        with served.client() as nobody:
            told = nobody.get("/readyz")
            assert (told.status_code, told.json()["ready"]) == (503, False)
            assert told.json()["checks"]["database"] == "the file of the database was removed or replaced"
            assert str(served.home.folder) not in told.text
            assert nobody.get("/healthz").status_code == 200
            aside.rename(file)
            assert nobody.get("/readyz").status_code == 200
    finally:
        if aside.exists():
            aside.rename(file)
