"""Tasks over HTTP: what a command does when a server of its home runs."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from skep import errors
from skep.app.carrier import only
from skep.app.presence import Server
from skep.errors import Defect, SkepError, Unavailable
from skep.gateway.forms import Refusal, StepForm, TaskForm
from skep.gateway.tokens import Tokens
from skep.state.events import Recorded, TaskEnded
from skep.state.names import check_name, is_hive_id
from skep.state.wire import from_json
from skep.tasks.task import Step, Task, is_task_id, missing

#: A stream says something every 15 s, see `skep.gateway.stream`.
_TIMEOUT = httpx.Timeout(10.0, read=45.0)
#: How often a lost stream is taken up again before the server is given up: long enough for one that is started anew.
_TRIES = 40
_PAUSE_S = 0.5


@asynccontextmanager
async def open_remote(server: Server, home: Path, account_id: str, *, actor: str) -> AsyncIterator[RemoteTasks]:
    """Speak to the server of this home for an account, as this user."""
    headers = Tokens(home / "keys").headers(account_id, actor)
    # The variables that name a proxy are not for a server of this very machine.
    async with httpx.AsyncClient(base_url=server.address, headers=headers, timeout=_TIMEOUT, trust_env=False) as client:
        yield RemoteTasks(client, account_id)


class RemoteTasks:
    """The tasks of one account at a server; see `skep.app.carrier.Carrier`."""

    def __init__(self, client: httpx.AsyncClient, account_id: str) -> None:
        self._client = client
        self._account = account_id

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        yield  # that is what a server does

    async def submit(self, hive: str | None, prompt: str, *, thread: str, key: str | None = None) -> Task:
        found = only([one["id"] for one in await self._get("/api/hives")]) if hive is None else hive
        # With a key of its own the request can be sent again when the connection was lost in the middle of it.
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        body = {"prompt": prompt, "thread": thread}
        return self._task(await self._post(f"/api/hives/{_hive(found)}/prompt", body, headers=headers))

    async def show(self, task_id: str) -> Task:
        return self._task(await self._get(_path(task_id)))

    async def list(
        self, *, hive: str | None = None, statuses: Collection[str] = (), limit: int = 50
    ) -> tuple[Task, ...]:
        asked: dict[str, Any] = {"limit": limit, "status": list(statuses)}
        if hive is not None:
            asked["hive"] = hive
        return tuple(self._task(one) for one in await self._get("/api/tasks", asked))

    async def steps(self, task_id: str) -> tuple[Step, ...]:
        found = await self._get(_path(task_id, "/steps"))
        return tuple(StepForm.model_validate(one).step() for one in found)

    async def cancel(self, task_id: str, *, why: str = "") -> Task:
        return self._task(await self._post(_path(task_id, "/cancel"), {"why": why}))

    async def retry(self, task_id: str) -> Task:
        return self._task(await self._post(_path(task_id, "/retry"), None))

    async def fork(self, task_id: str, step: int) -> Task:
        return self._task(await self._post(_path(task_id, "/fork"), {"step": step}))

    async def answer(self, task_id: str, answer: str, *, call: str | None = None) -> Task:
        body = {"answer": answer, "call": call}
        return self._task(await self._post(_path(task_id, "/answer"), body))

    async def follow(self, task: Task, *, after: int = 0) -> AsyncGenerator[Recorded]:
        """Yield the events of a task; a stream that was cut is taken up where it was."""
        failures = 0
        while True:
            try:
                async with aclosing(self._stream(task, after)) as events:
                    async for recorded in events:
                        failures, after = 0, recorded.seq
                        yield recorded
                        if recorded.task_id == task.id and isinstance(recorded.event, TaskEnded):
                            return
                if (await self.show(task.id)).ended:
                    return
            except (httpx.TransportError, Unavailable) as error:
                failures += 1
                if failures == _TRIES:
                    raise _gone(task) from error
            await asyncio.sleep(_PAUSE_S)

    async def _stream(self, task: Task, after: int) -> AsyncGenerator[Recorded]:
        headers = {"Last-Event-ID": str(after), "Accept": "text/event-stream"}
        async with self._client.stream("GET", f"/api/tasks/{task.id}/events", headers=headers) as response:
            if response.status_code != 200:
                await response.aread()
                raise _refusal(response)
            async for line in response.aiter_lines():
                if line.startswith("data:"):  # each event is one line of JSON; its id is in it
                    yield from_json(json.loads(line.removeprefix("data:")))

    async def _get(self, path: str, asked: dict[str, Any] | None = None) -> Any:
        return await self._ask("GET", path, params=asked)

    async def _post(self, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None = None) -> Any:
        return await self._ask("POST", path, json=body, headers=headers)

    async def _ask(self, method: str, path: str, **request: Any) -> Any:
        again = method == "GET" or bool(request.get("headers"))
        try:
            response = await self._client.request(method, path, **request)
        except httpx.TransportError as error:
            if not again:
                raise _silent(error) from error
            await asyncio.sleep(_PAUSE_S)
            try:
                response = await self._client.request(method, path, **request)
            except httpx.TransportError as second:
                raise _silent(second) from second
        if response.is_success:
            return response.json()
        raise _refusal(response)

    def _task(self, data: Any) -> Task:
        return TaskForm.model_validate(data).task(self._account)


def _path(task_id: str, act: str = "") -> str:
    """Return where a task is; what cannot be the id of one leads elsewhere, and is refused as the server would."""
    if not is_task_id(task_id):
        raise missing(task_id)
    return f"/api/tasks/{task_id}{act}"


def _hive(reference: str) -> str:
    return reference if is_hive_id(reference) else check_name("hive", reference)


def _refusal(response: httpx.Response) -> SkepError:
    """Build the error that the server had."""
    try:
        said = Refusal.model_validate_json(response.content)
    except ValidationError:
        return Defect(f"the server answered {response.status_code}", hint="its log says more")
    kind = getattr(errors, said.error, None)
    known = kind if isinstance(kind, type) and issubclass(kind, SkepError) else SkepError
    return known(said.message, hint=said.hint)


def _silent(error: httpx.TransportError) -> Unavailable:
    return Unavailable(
        f"the server of this home does not answer: {type(error).__name__}", hint="try again, or start it: skep serve"
    )


def _gone(task: Task) -> Unavailable:
    return Unavailable(
        "the server is gone", hint=f"the task goes on when one runs (skep serve); then: skep task show {task.id}"
    )
