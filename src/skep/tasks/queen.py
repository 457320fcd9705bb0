"""The queen: see what a prompt asks for, answer it, have a worker do it, or split it among several and gather."""

from __future__ import annotations

import hashlib
import json
from base64 import b32encode
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import LimitReached, ModelMissing, ScriptInvalid
from skep.healing.diagnosis import diagnose, healed
from skep.healing.history import History, Options
from skep.healing.naming import name
from skep.healing.remedies import BackOff, GiveUp, InstructStricter, Reflect, SwitchProvider
from skep.models.failures import ModelFailure
from skep.state.events import Classified, Gathered, Planned
from skep.tasks.ledger import Ledger, insert_task
from skep.tasks.meter import Meter
from skep.tasks.partial import stopped
from skep.tasks.run import Outcome, Run
from skep.tasks.submission import new_row
from skep.tasks.task import Task
from skep.tasks.thinking import Heard, Thinker

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelMessage

MOST_TASKS = 12
_GATHERED_CHARS = 6_000
T = TypeVar("T", bound=BaseModel)

_CLASSIFY = """\
Decide how a prompt is to be answered:
- reply: it needs nothing but words, such as a greeting or a question that can be answered from what is known;
- one: something has to be done, looked up, computed, run or written, and one worker can do it;
- many: it has parts that are worth doing apart, by several workers.
When in doubt, one."""

_PLAN = f"""\
Split the prompt into at most {MOST_TASKS} tasks for workers who share one computer and do not see the prompt. Each task
has a title, a prompt that says everything its worker has to know, and the numbers (from 1) of the tasks that have to be
done before it. Tasks that do not need each other run at the same time, so they must not write the same files."""

_GATHER = "Your workers are done. Write the reply to the person from what they report; say plainly what failed."


class Classification(BaseModel):
    """How a prompt is to be answered."""

    model_config = ConfigDict(extra="ignore")

    kind: Literal["reply", "one", "many"]
    why: Annotated[str, Field(max_length=1_000)] = ""


class Part(BaseModel):
    """One task of a plan."""

    model_config = ConfigDict(extra="ignore")

    title: Annotated[str, Field(min_length=1, max_length=200)]
    prompt: Annotated[str, Field(min_length=1, max_length=20_000)]
    after: Annotated[list[int], Field(max_length=MOST_TASKS)] = Field(default_factory=list)


class Plan(BaseModel):
    """The tasks that a prompt is split into."""

    model_config = ConfigDict(extra="ignore")

    tasks: Annotated[list[Part], Field(min_length=1, max_length=MOST_TASKS)]


class Queen:
    """Answers one prompt. `work` has a worker carry the whole of it."""

    def __init__(
        self,
        run: Run,
        ledger: Ledger,
        thinker: Thinker,
        meter: Meter,
        *,
        options: Callable[[float | None], Options],
        wake: Callable[[], None],
    ) -> None:
        self._run = run
        self._ledger = ledger
        self._thinker = thinker
        self._meter = meter
        self._options = options
        self._wake = wake
        self._history = History()

    async def answer(
        self, instructions: str, history: Sequence[ModelMessage], work: Callable[[], Awaitable[Outcome]]
    ) -> Outcome:
        """Carry the prompt to an outcome; where a limit is reached before a worker has begun, that is one."""
        try:
            return await self._answer(instructions, history, work)
        except LimitReached as error:
            return Outcome("failed", error.message, reply=stopped(error.message), partial=True)

    async def _answer(
        self, instructions: str, history: Sequence[ModelMessage], work: Callable[[], Awaitable[Outcome]]
    ) -> Outcome:
        from pydantic_ai.messages import ModelRequest, SystemPromptPart, UserPromptPart

        def messages(told: str, prompt: str = self._run.task.prompt) -> list[ModelMessage]:
            first = ModelRequest(parts=[SystemPromptPart(told)])
            return [first, *history, ModelRequest(parts=[UserPromptPart(prompt)])]

        kind = await self._classify(messages(_CLASSIFY))
        if kind == "reply":
            said = await self._ask("reply", messages(instructions))
            if said is not None and said.text.strip():
                return Outcome("succeeded", "done", reply=said.text)
        if kind == "many":
            plan = await self._plan(messages(_PLAN))
            if plan is not None and len(plan.tasks) > 1:
                reports = await self._dispatch(plan)
                return await self._gather(
                    messages(f"{instructions}\n{_GATHER}", _report(self._run.task, reports)), reports
                )
        return await work()

    async def _classify(self, messages: list[ModelMessage]) -> str:
        heard = await self._ask("classify", messages, Classification)
        found = _read(Classification, heard) or Classification(kind="one", why="it could not be classified")
        self._run.note("classified", Classified(kind=found.kind, why=found.why[:500]))
        self._run.journal.write_soon()
        return found.kind

    async def _plan(self, messages: list[ModelMessage]) -> Plan | None:
        return _read(Plan, await self._ask("plan", messages, Plan))

    async def _ask(
        self, role: Any, messages: list[ModelMessage], schema: type[BaseModel] | None = None
    ) -> Heard | None:
        """Ask, and heal what can be healed by a rule; None if there is no answer after that."""
        from pydantic_ai.messages import ModelRequest, UserPromptPart

        while True:
            try:
                return await self._thinker.ask(role, messages, schema=schema)
            except (ModelMissing, ScriptInvalid):
                return None  # the worker says so, with what to do about it
            except ModelFailure as error:
                failure = name(error)
            remedy = diagnose(failure, self._history, options=self._options(max(0.0, self._meter.left_s)))
            if isinstance(remedy, GiveUp | Reflect):
                return None
            attempt = self._history.attempt
            key = f"queen healed {attempt}"
            await self._run.record(key, healed(failure, remedy, attempt=attempt))
            self._history = self._history.after(failure, remedy)
            match remedy:
                case InstructStricter(text=text):
                    messages = [*messages, ModelRequest(parts=[UserPromptPart(text)])]
                case SwitchProvider(avoid=provider):
                    self._thinker.avoid |= {provider}
                case BackOff(seconds=seconds):
                    await self._run.rest(key, seconds)

    async def _dispatch(self, plan: Plan) -> list[Task]:
        """Put the tasks of a plan on record, once, and wait until all have ended.

        A fork that takes this over has the tasks of the one that it was forked from.
        """
        rows = _rows(self._run, plan)
        told = [{"id": row["id"], "title": row["title"], "after": json.loads(row["after"])} for row in rows]
        if self._run.ahead and "planned" not in self._run.journal:
            await self._run.journal.record(("planned", Planned(tasks=tuple(told))), also=partial(_insert, rows))
            self._wake()

        async def body() -> list[str]:
            for row in rows:
                await self._until_ended(row["id"])
            return [row["id"] for row in rows]

        with self._meter.standing_still():
            ids = await self._run.step("gather", body)
        self._run.note("gathered", Gathered(tasks=tuple(ids)), numbered=True)
        return [task for one in ids if (task := await self._ledger.find(one)) is not None]

    async def _until_ended(self, task_id: str) -> None:
        task = await self._ledger.find(task_id)
        if task is None or task.ended:
            return
        ends = self._ledger.log.follow(task.hive_id, task_id=task_id, types=("task_ended",))
        async with aclosing(ends) as stream:
            async for _ in stream:
                return

    async def _gather(self, messages: list[ModelMessage], reports: Sequence[Task]) -> Outcome:
        try:
            heard = await self._ask("reply", messages)
        except LimitReached:
            heard = None  # what the workers report has to do
        well = [one for one in reports if one.status == "succeeded"]
        plain = "\n\n".join(f"{one.title}: {one.reply or one.error or one.status}" for one in reports)
        reply = heard.text if heard is not None and heard.text.strip() else plain
        sure = [one.confidence for one in well if one.confidence is not None]
        least, in_part = min(sure, default=None), len(well) < len(reports)
        if not well:
            return Outcome("failed", "none of its tasks succeeded", reply=reply, partial=in_part)
        return Outcome("succeeded", "done", reply=reply, confidence=least, partial=in_part)


def _read(schema: type[T], heard: Heard | None) -> T | None:
    return None if heard is None or heard.value is None else schema.model_validate(heard.value)


def child_id(parent: str, number: int) -> str:
    """Return the id of a task of a plan: the same whenever the plan is gone through."""
    return "tsk_" + b32encode(hashlib.sha256(f"{parent}:{number}".encode()).digest()[:16]).decode().lower().rstrip("=")


def _rows(run: Run, plan: Plan) -> list[dict[str, Any]]:
    """Return the rows of a plan's tasks. One can only wait for those that stand before it, so there is no circle."""
    ids = [child_id(run.task.id, number) for number in range(1, len(plan.tasks) + 1)]
    rows = []
    for index, part in enumerate(plan.tasks):
        after = sorted({ids[one - 1] for one in part.after if 1 <= one <= index})
        family = {"id": ids[index], "root": run.task.root, "parent": run.task.id, "title": part.title, "after": after}
        status = "waiting" if after else "queued"
        made = new_row(
            run.hive, part.prompt, thread=run.task.thread, actor="queen", now=run.now(), status=status, **family
        )
        rows.append(made)
    return rows


async def _insert(rows: Sequence[dict[str, Any]], connection: AsyncConnection) -> None:
    for row in rows:
        await insert_task(connection, row)


def _report(task: Task, reports: Sequence[Task]) -> str:
    told = "\n\n".join(
        f"## {one.title} ({one.status})\n{(one.reply or one.error or '')[:_GATHERED_CHARS]}" for one in reports
    )
    return f"{task.prompt}\n\n# What the workers report\n\n{told}"
