"""What should not come in does not; each attack comes in where the one thing that stops it is taken away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from skep.app.program import open_program
from skep.app.reception import open_sessions
from skep.config import Paths, Settings
from skep.gateway.api import build
from skep.gateway.door import Door
from skep.gateway.gate import Bounds
from skep.gateway.tokens import Tokens
from skep.tasks.tasks import Tasks

HERE = "http://127.0.0.1:7411"
PROMPT = "/api/hives/garden/prompt"
Attack = Sequence[tuple[str, str]]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    """A door with nobody behind it who works: prompts are taken, and stay."""
    tmp_path = tmp_path_factory.mktemp("door")
    paths = Paths(config=tmp_path / "config.json", home=tmp_path / "home", logs=tmp_path / "log")
    async with open_program(paths, Settings()) as program, open_sessions(program) as sessions:
        for account, hive in (("default", "garden"), ("acme", "meadow")):
            await program.accounts.create(account)
            await program.hives.create(hive, account_id=account, actor="test")
        tasks = Tasks(program.database, program.log)
        yield Door(tasks=tasks, hives=program.hives, sessions=sessions, tokens=Tokens(tmp_path / "keys"))


def visitor(
    door: Door, *, account: str | None = "default", names: Sequence[str] = (), bounds: Bounds | None = None
) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {door.tokens.of(account)}"} if account else {}
    transport = httpx.ASGITransport(app=build(door, names=names, bounds=bounds))
    return httpx.AsyncClient(transport=transport, base_url=HERE, headers=headers)


async def test_without_a_token_of_this_home_nothing_is_told(door: Door, tmp_path: Path) -> None:
    other_home = Tokens(tmp_path / "elsewhere").of("default")
    async with visitor(door, account=None) as nobody:
        for sent in ({}, {"Authorization": f"Bearer {other_home}"}, {"Authorization": "Basic eDp5"}):
            refused = await nobody.get("/api/hives", headers=sent)
            assert (refused.status_code, refused.json()["error"]) == (401, "Denied")
            assert "garden" not in refused.text
    async with visitor(door) as known:
        assert [hive["name"] for hive in (await known.get("/api/hives")).json()] == ["garden"]


async def test_another_accounts_tasks_are_as_if_they_were_not_there(door: Door) -> None:
    async with visitor(door) as owner, visitor(door, account="acme") as stranger:
        own = (await owner.post(PROMPT, json={"prompt": "secret"})).json()["id"]
        never = "tsk_" + "a" * 26
        for act in ("", "/steps", "/events"):
            theirs, nobodys = [await stranger.get(f"/api/tasks/{one}{act}") for one in (own, never)]
            assert theirs.status_code == 404
            assert theirs.text.replace(own, never) == nobodys.text
        for act, body in (("cancel", {}), ("retry", None), ("fork", {"step": 1}), ("answer", {"answer": "yes"})):
            assert (await stranger.post(f"/api/tasks/{own}/{act}", json=body)).status_code == 404
        assert (await stranger.get("/api/tasks")).json() == []
        assert (await stranger.post(PROMPT, json={"prompt": "let me in"})).status_code == 404
        assert (await owner.get(f"/api/tasks/{own}")).json()["status"] == "queued"


async def recorded_actor(door: Door, task_id: str, account: str = "default") -> str:
    task = await door.tasks.show(task_id, account_id=account)
    async with aclosing(door.tasks.follow(task)) as events:
        return (await anext(events)).actor


async def test_only_a_command_of_the_home_says_which_user_asks(door: Door) -> None:
    claim = {"Skep-Account": "default", "Skep-Actor": "cli:root"}
    async with visitor(door, account="acme") as stranger, visitor(door) as known:
        for forger in (stranger, known):
            for sent in (claim, {"Skep-Actor": "cli:root"}, {"Skep-Account": "default"}):
                refused = await forger.post(PROMPT, json={"prompt": "forged"}, headers=sent)
                assert (refused.status_code, refused.json()["error"]) == (403, "Denied")
        honest = await known.post(PROMPT, json={"prompt": "honest"})
        assert await recorded_actor(door, honest.json()["id"]) == "api:default"
    async with visitor(door, account=None) as command:
        local = door.tokens.headers("default", "cli:root")
        for forged in ("worker", "api:default", "cli:", "cli:a b"):
            refused = await command.post(PROMPT, json={"prompt": "x"}, headers={**local, "Skep-Actor": forged})
            assert (refused.status_code, refused.json()["error"]) == (400, "InvalidRequest")
        taken = await command.post(PROMPT, json={"prompt": "typed"}, headers=local)
        assert await recorded_actor(door, taken.json()["id"]) == "cli:root"


@pytest.mark.parametrize(
    "path",
    [
        "/api/tasks/..%2f..%2fkeys",
        "/api/tasks/%2e%2e/hives",
        "/api/tasks/tsk_%00",
        "/api/hives/..%2fx/prompt",
        "/api/tasks/",
    ],
)
async def test_ids_lead_nowhere_but_to_tasks_and_hives(door: Door, path: str) -> None:
    async with visitor(door) as known:
        refused = await known.get(path)
        assert refused.status_code in (400, 404, 405)
        assert set(refused.json()) == {"error", "message", "hint"}


FOREIGN: dict[str, Attack] = {
    "a name that leads here only for now": [("Host", "rebound.example:7411")],
    "no name": [("Host", "")],
    "a page of another site": [("Origin", "https://evil.example")],
    "a page in a sandboxed frame": [("Origin", "null")],
    "a form of another site": [("Sec-Fetch-Site", "cross-site")],
    "a page of another port of this machine": [("Origin", "http://127.0.0.1:9999"), ("Sec-Fetch-Site", "same-site")],
}


@pytest.mark.parametrize("attack", FOREIGN)
async def test_pages_in_a_browser_cannot_ask_even_with_the_token(door: Door, attack: str) -> None:
    async with visitor(door) as known:
        refused = await known.get("/api/hives", headers=dict(FOREIGN[attack]))
        assert (refused.status_code, "garden" in refused.text) == (403, False)


async def test_names_and_origins_that_were_configured_come_in(door: Door) -> None:
    """The control of the attacks above: the same requests, where the name is one of the server's."""
    async with visitor(door, names=["rebound.example"]) as known:
        for sent in (
            {"Host": "rebound.example:7411"},
            {"Host": "rebound.example", "Origin": "https://rebound.example", "Sec-Fetch-Site": "same-origin"},
        ):
            assert (await known.get("/api/hives", headers=sent)).status_code == 200


async def large(pieces: int) -> AsyncIterator[bytes]:
    for _ in range(pieces):
        yield b" " * (1024 * 1024)


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "in chunks"])
async def test_a_body_of_100_mb_is_refused_before_it_is_read(door: Door, announced: bool) -> None:
    sent = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal sent
        async for piece in large(100):
            sent += len(piece)
            yield piece

    length = {"Content-Length": str(100 * 1024 * 1024)} if announced else {}
    async with visitor(door) as known:
        refused = await known.post(PROMPT, content=counted(), headers={"Content-Type": "application/json", **length})
        assert (refused.status_code, refused.json()["error"]) == (413, "InvalidRequest")
        assert sent <= 4 * 1024 * 1024
    async with visitor(door, bounds=Bounds(body_bytes=200 * 1024 * 1024)) as unbounded:
        read = await unbounded.post(PROMPT, content=large(3), headers={"Content-Type": "application/json"})
        assert read.json()["message"] == "the body is no JSON object"


async def slow(body: bytes) -> AsyncIterator[bytes]:
    for letter in body:
        yield bytes([letter])
        await asyncio.sleep(0.02)


async def test_a_body_that_trickles_in_does_not_hold_the_server(door: Door) -> None:
    headers, body = {"Content-Type": "application/json"}, b'{"prompt": "slowly"}'
    async with visitor(door, bounds=Bounds(body_s=0.1)) as hurried:
        assert (await hurried.post(PROMPT, content=slow(body), headers=headers)).status_code == 408
    async with visitor(door, bounds=Bounds(body_s=60)) as patient:
        assert (await patient.post(PROMPT, content=slow(body), headers=headers)).status_code == 202


@pytest.mark.parametrize("said", ["-1", "1e3", "²", "99999999999999999999", "0" * 5000, "x\tid: 7", " "])
async def test_a_last_event_id_is_a_number_or_refused(door: Door, said: str) -> None:
    async with visitor(door) as known:
        task = (await known.post(PROMPT, json={"prompt": "hello"})).json()["id"]
        refused = await known.get(f"/api/tasks/{task}/events", headers={b"Last-Event-ID": said.encode()})
        assert (refused.status_code, refused.json()["error"]) == (400, "InvalidRequest")


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"prompt": "x", "more": 1}, "body.more"),
        ({"prompt": 7}, "body.prompt"),
        ({}, "body.prompt"),
        ([], "no JSON object"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "\x00bell\x07"}, "prompt"),
        ({"prompt": "x", "thread": "../x"}, "thread"),
    ],
)
async def test_a_request_that_is_wrong_is_refused_by_what_is_wrong_in_it(door: Door, body: object, names: str) -> None:
    async with visitor(door) as known:
        refused = await known.post(PROMPT, json=body)
        assert refused.status_code == 400
        assert names in refused.json()["message"]
        assert body not in [{"prompt": task["prompt"]} for task in (await known.get("/api/tasks?limit=500")).json()]


@pytest.mark.parametrize("query", ["wait=301", "wait=-1", "wait=nan", "wait=x"])
async def test_no_request_waits_for_ever(door: Door, query: str) -> None:
    async with visitor(door) as known:
        assert (await known.post(f"{PROMPT}?{query}", json={"prompt": "x"})).status_code == 400


async def test_what_went_wrong_inside_is_not_told_outside(door: Door) -> None:
    secret = "hunter2-hunter2"

    async def broken() -> None:
        raise RuntimeError(secret)

    ill = Door(door.tasks, door.hives, door.sessions, door.tokens, checks={"engine": broken})
    transport = httpx.ASGITransport(app=build(ill), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=HERE) as nobody:
        told = await nobody.get("/readyz")
        assert (told.status_code, told.json()["error"], secret in told.text) == (500, "Defect", False)
