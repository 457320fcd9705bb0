"""Prompts and tasks over HTTP: who asks is told by the token, and sees what is their account's alone."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Response
from sse_starlette import EventSourceResponse

from skep.gateway.door import AtDoor, Door, FromCaller
from skep.gateway.forms import (
    MAX_LIST,
    MAX_WAIT_S,
    ComputerForm,
    HiveForm,
    Place,
    Prompt,
    Reason,
    Refusal,
    Reply,
    StepForm,
    TaskForm,
    Thread,
)
from skep.gateway.stream import LARGEST_SEQ, check_seen, position, stream
from skep.tasks.task import STATUSES, Status, Task

router = APIRouter(prefix="/api", responses={"default": {"model": Refusal, "description": "Why it was refused."}})

HiveInPath = Annotated[str, Path(description="Name or id of the hive.")]
TaskInPath = Annotated[str, Path(description="Id of the task.")]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for the task's end.")]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        pattern=r"^[!-~]+$",
        description="The same key again returns the task that it made first.",
    ),
]


@router.get("/hives", tags=["hives"], summary="List the hives of the account")
async def list_hives(door: AtDoor, caller: FromCaller) -> list[HiveForm]:
    return [HiveForm.of(hive) for hive in await door.hives.list(account_id=caller.account_id)]


@router.post(
    "/hives/{hive}/prompt",
    tags=["tasks"],
    summary="Ask a hive for something",
    status_code=202,
    responses={200: {"model": TaskForm, "description": "The task has ended within the time waited for."}},
)
async def prompt(
    hive: HiveInPath,
    asked: Prompt,
    door: AtDoor,
    caller: FromCaller,
    response: Response,
    key: Key = None,
    wait: Wait = 0,
) -> TaskForm:
    """Take a prompt: it is on record, and will be carried to a reply, when this answers."""
    found = await door.hives.show(hive, account_id=caller.account_id)
    door.accept()
    task = await door.tasks.submit(found, asked.prompt, thread=asked.thread, actor=caller.actor, key=key)
    if wait:
        task = await _wait(door, task, wait)
    response.headers["Location"] = f"/api/tasks/{task.id}"
    response.status_code = 200 if task.ended else 202
    return TaskForm.of(task)


@router.post("/hives/{hive}/computer", tags=["hives"], summary="Have the computer of a thread up")
async def wake_computer(hive: HiveInPath, asked: Thread, door: AtDoor, caller: FromCaller) -> ComputerForm:
    """Bring the computer up and keep it until nobody has used it for a while: commands of this machine then join it."""
    found = await door.hives.show(hive, account_id=caller.account_id)
    computer = await door.sessions.resolve(found, asked.thread, account_id=caller.account_id)
    return ComputerForm(session=door.sessions.wanted(found, asked.thread).id, down=computer.down)


@router.get("/tasks", tags=["tasks"], summary="List tasks, the newest first")
async def list_tasks(
    door: AtDoor,
    caller: FromCaller,
    hive: Annotated[str | None, Query(description="Only those of this hive.")] = None,
    status: Annotated[list[Status] | None, Query(description=f"Only those in it: {', '.join(STATUSES)}.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LIST)] = 50,
) -> list[TaskForm]:
    account = caller.account_id
    hive_id = None if hive is None else (await door.hives.show(hive, account_id=account)).id
    found = await door.tasks.list(account_id=account, hive_id=hive_id, statuses=status or (), limit=limit)
    return [TaskForm.of(task) for task in found]


@router.get("/tasks/{task}", tags=["tasks"], summary="Show a task")
async def show_task(task: TaskInPath, door: AtDoor, caller: FromCaller, wait: Wait = 0) -> TaskForm:
    """Return the task as it stands, or with `wait` as it is at its end or when the time is up."""
    found = await door.tasks.show(task, account_id=caller.account_id)
    return TaskForm.of(await _wait(door, found, wait) if wait else found)


@router.get("/tasks/{task}/steps", tags=["tasks"], summary="List the steps that a task took")
async def list_steps(task: TaskInPath, door: AtDoor, caller: FromCaller) -> list[StepForm]:
    return [StepForm.of(step) for step in await door.tasks.steps(task, account_id=caller.account_id)]


@router.get(
    "/tasks/{task}/events",
    tags=["tasks"],
    summary="Follow a task",
    response_class=EventSourceResponse,
    responses={200: {"description": "Server-sent events.", "content": {"text/event-stream": {}}}},
)
async def follow_task(
    task: TaskInPath,
    door: AtDoor,
    caller: FromCaller,
    after: Annotated[int, Query(ge=0, le=LARGEST_SEQ, description="Begin after the event of this number.")] = 0,
    last_event_id: Annotated[str | None, Header(description="The id that was seen last; it wins over after.")] = None,
) -> EventSourceResponse:
    """Send the events of the task and of its children, until it has ended.

    The id of a message is the event's number in the hive's log. Whoever was cut off sends the last one as
    Last-Event-ID, and misses and repeats nothing.
    """
    beginning = position(last_event_id, after)
    found = await door.tasks.show(task, account_id=caller.account_id)
    await check_seen(door.tasks, found, beginning)
    return stream(door.tasks, found, after=beginning)


@router.post("/tasks/{task}/cancel", tags=["tasks"], summary="End a task at once", status_code=202)
async def cancel_task(
    task: TaskInPath, door: AtDoor, caller: FromCaller, asked: Reason | None = None, wait: Wait = 0
) -> TaskForm:
    why = asked.why if asked else ""
    found = await door.tasks.cancel(task, account_id=caller.account_id, actor=caller.actor, why=why)
    return TaskForm.of(await _wait(door, found, wait) if wait else found)


@router.post("/tasks/{task}/retry", tags=["tasks"], summary="Try a task anew, as another task", status_code=202)
async def retry_task(task: TaskInPath, door: AtDoor, caller: FromCaller) -> TaskForm:
    return TaskForm.of(await door.tasks.retry(task, account_id=caller.account_id, actor=caller.actor))


@router.post("/tasks/{task}/fork", tags=["tasks"], summary="Run a task again from a step", status_code=202)
async def fork_task(task: TaskInPath, asked: Place, door: AtDoor, caller: FromCaller) -> TaskForm:
    return TaskForm.of(await door.tasks.fork(task, asked.step, account_id=caller.account_id, actor=caller.actor))


@router.post("/tasks/{task}/answer", tags=["tasks"], summary="Answer what a task asks")
async def answer_task(task: TaskInPath, asked: Reply, door: AtDoor, caller: FromCaller) -> TaskForm:
    answered = await door.tasks.answer(
        task, asked.answer, account_id=caller.account_id, actor=caller.actor, call=asked.call
    )
    return TaskForm.of(answered)


async def _wait(door: Door, task: Task, timeout_s: float) -> Task:
    """Wait for the end of a task, of the time, or of the server."""
    ended = asyncio.ensure_future(door.tasks.wait(task.id, account_id=task.account_id, timeout_s=timeout_s))
    closing = asyncio.ensure_future(door.closing.wait())
    try:
        await asyncio.wait({ended, closing}, return_when=asyncio.FIRST_COMPLETED)
        return ended.result() if ended.done() else task
    finally:
        for waiting in (ended, closing):
            waiting.cancel()
        await asyncio.wait({ended, closing})
