"""What should not come in does not; each attack comes in where the one thing that stops it is taken away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Message

from skep.app.program import open_program
from skep.app.reception import open_sessions
from skep.config import Paths, Settings
from skep.gateway.api import application, build
from skep.gateway.door import Door
from skep.gateway.gate import Bounds, Gate, Look, called_by, from_here
from skep.gateway.stream import stream
from skep.gateway.tokens import Tokens
from skep.state.chain import total
from skep.tasks.submission import MOST_PROMPT_BYTES
from skep.tasks.tasks import Tasks

HERE = "http://127.0.0.1:7411"
PROMPT = "/api/hives/garden/prompt"


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


async def test_what_is_wrong_with_the_file_of_a_token_is_not_told_outside(door: Door) -> None:
    async with visitor(door, account="acme") as known:
        assert (await known.get("/api/hives")).status_code == 200
        file = door.tokens.file("acme")
        for mode, status in ((0o644, 401), (0o600, 200)):
            file.chmod(mode)
            told = await known.get("/api/hives")
            assert (told.status_code, str(file.parent) in told.text) == (status, False)


ACTS: Sequence[tuple[str, str, object]] = [
    ("GET", "", None),
    ("GET", "/steps", None),
    ("POST", "/answer", {"answer": "yes"}),
    ("POST", "/cancel", {}),
    ("POST", "/retry", None),
    ("POST", "/fork", {"step": 0}),
    ("GET", "/events", None),
]


async def test_another_accounts_tasks_and_hives_are_as_if_they_were_not_there(door: Door) -> None:
    async with visitor(door) as owner, visitor(door, account="acme") as stranger:
        task = (await owner.post(PROMPT, json={"prompt": "secret"})).json()
        own, never = task["id"], "tsk_" + "a" * 26
        for method, act, body in ACTS:
            theirs, nobodys = [
                await stranger.request(method, f"/api/tasks/{one}{act}", json=body) for one in (own, never)
            ]
            assert (theirs.status_code, theirs.text.replace(own, never)) == (404, nobodys.text)
            if act != "/events":  # which would not end
                assert (await owner.request(method, f"/api/tasks/{own}{act}", json=body)).status_code != 404
        for name, none in ((task["hive"], "hv-" + "a" * 16), ("garden", "nowhere")):
            for act in ("prompt", "computer"):
                body = {"prompt": "let me in"} if act == "prompt" else {}
                theirs, nobodys = [await stranger.post(f"/api/hives/{one}/{act}", json=body) for one in (name, none)]
                assert (theirs.status_code, theirs.text.replace(name, none)) == (404, nobodys.text)
        assert (await stranger.get("/api/tasks")).json() == []


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


LEADING_OUT = ["/api/tasks/..%2f..%2fkeys%2fgateway.token", "/api/tasks/%2e%2e%2f%2e%2e%2fkeys%2fgateway.token"]


async def test_ids_lead_nowhere_but_to_tasks_and_hives(door: Door, tmp_path: Path) -> None:
    async with visitor(door) as known:
        for path in (*LEADING_OUT, "/api/tasks/tsk_%00", "/api/tasks/", "/api/tasks/..%2fhives"):
            refused = await known.get(path)
            assert refused.status_code in (400, 404)
            assert set(refused.json()) == {"error", "message", "hint"}
        for hive in ("..%2fx", "%2e%2e", "a%00b", "a%0d%0aSet-Cookie:x"):
            refused = await known.post(f"/api/hives/{hive}/prompt", json={"prompt": "x"})
            assert refused.status_code in (400, 404)
            assert "set-cookie" not in refused.headers
        for thread in ("../x", "cli:a\r\nb", ""):
            refused = await known.post(PROMPT, json={"prompt": "x", "thread": thread})
            assert (refused.status_code, "thread" in refused.text) == (400, True), thread
        # Of a name that is a thread's no path is made: the folder of a session is named by a number.
        assert (await known.post(PROMPT, json={"prompt": "x", "thread": "cli:../../x"})).status_code == 202


async def test_where_an_id_is_taken_for_a_path_the_same_requests_lead_to_the_token(tmp_path: Path) -> None:
    """The control of the attack above."""
    token, naive = Tokens(tmp_path / "keys").of("default"), FastAPI()
    (tmp_path / "state/tasks").mkdir(parents=True)

    @naive.get("/api/tasks/{task:path}")
    def show(task: str) -> str:
        return (tmp_path / "state/tasks" / task).read_text()

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=naive), base_url=HERE) as anybody:
        for path in LEADING_OUT:
            assert token in (await anybody.get(path)).text


REBOUND: dict[str, dict[str, str]] = {
    "a name that leads here only for now": {"Host": "rebound.example:7411"},
    "no name": {"Host": ""},
    "a name with ours in it": {"Host": "127.0.0.1.rebound.example"},
}
FOREIGN: dict[str, dict[str, str]] = {
    "a page of another site": {"Origin": "https://evil.example"},
    "a page in a sandboxed frame": {"Origin": "null"},
    "a form of another site": {"Sec-Fetch-Site": "cross-site"},
    "a page of another port of this machine": {"Origin": "http://127.0.0.1:9999", "Sec-Fetch-Site": "same-site"},
}


def behind(door: Door, *looks: Look) -> httpx.AsyncClient:
    """Give somebody with the token at a gate that looks at nothing else."""
    headers = {"Authorization": f"Bearer {door.tokens.of('default')}"}
    transport = httpx.ASGITransport(app=Gate(application(door), looks=looks))
    return httpx.AsyncClient(transport=transport, base_url=HERE, headers=headers)


@pytest.mark.parametrize("attack", REBOUND)
async def test_whoever_calls_the_server_by_another_name_is_refused(door: Door, attack: str) -> None:
    async with visitor(door) as known, behind(door, from_here) as unnamed:
        refused = await known.get("/api/hives", headers=REBOUND[attack])
        assert (refused.status_code, "garden" in refused.text) == (403, False)
        assert "garden" in (await unnamed.get("/api/hives", headers=REBOUND[attack])).text


@pytest.mark.parametrize("attack", FOREIGN)
async def test_pages_in_a_browser_cannot_ask_even_with_the_token(door: Door, attack: str) -> None:
    async with visitor(door) as known, behind(door, called_by(())) as from_anywhere:
        refused = await known.get("/api/hives", headers=FOREIGN[attack])
        assert (refused.status_code, "garden" in refused.text) == (403, False)
        assert "garden" in (await from_anywhere.get("/api/hives", headers=FOREIGN[attack])).text


async def test_names_that_were_configured_and_pages_of_theirs_come_in(door: Door) -> None:
    async with visitor(door, names=["own.example"]) as known:
        for sent in (
            {"Host": "own.example:7411"},
            {"Host": "own.example", "Origin": "https://own.example", "Sec-Fetch-Site": "same-origin"},
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


async def test_a_prompt_of_1_mb_is_refused_and_one_up_to_the_bound_is_taken(door: Door) -> None:
    async with visitor(door) as known:
        for size, status in ((1 << 20, 400), (MOST_PROMPT_BYTES + 1, 400), (MOST_PROMPT_BYTES, 202)):
            asked = await known.post(PROMPT, json={"prompt": "x" * size, "thread": "cli:large"})
            assert (asked.status_code, "xxx" in asked.text) == (status, status == 202)


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


async def received(response: EventSourceResponse, *, stuck: bool = False) -> tuple[bytes, BaseException | None]:
    """Return what a response sends for a while, and what it gave up with; a client that is stuck takes one piece."""
    sent = bytearray()

    async def send(message: Message) -> None:
        if stuck and sent:
            await asyncio.Event().wait()
        sent.extend(message.get("body", b""))

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    sending = asyncio.create_task(response({"type": "http", "method": "GET"}, receive, send))
    ended, _ = await asyncio.wait([sending], timeout=0.5)
    sending.cancel()
    await asyncio.wait([sending])
    return bytes(sent), sending.exception() if ended else None


async def test_the_id_of_another_hives_event_does_not_make_a_client_miss_its_own(door: Door) -> None:
    async with visitor(door) as known, visitor(door, account="acme") as other:
        found = (await known.post(PROMPT, json={"prompt": "hello"})).json()
        for _ in range(40):  # so that the log of the other hive is the longer one
            await other.post("/api/hives/meadow/prompt", json={"prompt": "hello"})
        task = await door.tasks.show(found["id"], account_id="default")
        foreign = await total(door.tasks.ledger.database) - 1
        refused = await known.get(f"/api/tasks/{task.id}/events", headers={"Last-Event-ID": str(foreign)})
        assert (refused.status_code, refused.json()["error"]) == (400, "InvalidRequest")
    assert b"prompted" in (await received(stream(door.tasks, task, after=0)))[0]
    assert b"prompted" not in (await received(stream(door.tasks, task, after=foreign)))[0], "the control misses it"


async def test_a_client_that_takes_nothing_is_given_up(door: Door) -> None:
    async with visitor(door) as known:
        prompts = [await known.post(PROMPT, json={"prompt": "hello", "thread": "cli:slow"}) for _ in range(2)]
    task = await door.tasks.show(prompts[0].json()["id"], account_id="default")
    await door.tasks.cancel(task.id, account_id="default", actor="test")  # so that there is more to send
    _, given_up = await received(stream(door.tasks, task, after=0, send_s=0.05), stuck=True)
    assert isinstance(given_up, SendTimeoutError)
    _, given_up = await received(stream(door.tasks, task, after=0, send_s=None), stuck=True)
    assert given_up is None, "the control waits as long as we do"


LINE_ENDS = "\u2028\u2029\x85"


async def test_what_a_prompt_says_cannot_pass_for_an_event(door: Door) -> None:
    forged = f"hi\n\nid: 99\nevent: task_ended\ndata: {{}}\n\n{LINE_ENDS}event: x"
    async with visitor(door) as known:
        asked = await known.post(PROMPT, json={"prompt": forged, "thread": "cli:forged"})
    task = await door.tasks.show(asked.json()["id"], account_id="default")
    sent = (await received(stream(door.tasks, task, after=0)))[0].decode()
    names = [line for line in sent.splitlines() if line.startswith("event:")]
    assert names == ["event: prompted"]
    naive = f"event: prompted\ndata: {forged}\n\n"
    assert [line for line in naive.splitlines() if line.startswith("event:")][1:] == ["event: task_ended", "event: x"]


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
