from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from tests.tasks.conftest import Open, until

from skep.errors import InvalidRequest
from skep.state.database import Database
from skep.state.events import Noted
from skep.state.hives import Hive
from skep.tasks.run import Outcome, Run
from skep.tasks.task import Task
from skep.tasks.tasks import Tasks


async def echo(run: Run) -> Outcome:
    """Take two steps, each on record, and say the prompt back."""
    for _ in range(2):

        async def body() -> str:
            return run.task.prompt.upper()

        said = await run.step("echo", body)
        run.note("noted", Noted(text=said), numbered=True)
    return Outcome("succeeded", "done", reply=said)


async def stay(run: Run) -> Outcome:
    """Never end by itself."""

    async def body() -> None:
        await asyncio.Event().wait()

    await run.step("stay", body)
    raise AssertionError


async def ask(tasks: Tasks, hive: Hive, prompt: str = "hello", **rest: str) -> Task:
    return await tasks.submit(hive, prompt, actor="me", **rest)


async def test_a_prompt_is_carried_to_a_reply(worker: Open, hive: Hive) -> None:
    async with worker(echo) as one:
        task = await ask(one.tasks, hive)
        task = await one.tasks.wait(task.id, account_id="bees", timeout_s=20)
        assert (task.status, task.reply, task.starts) == ("succeeded", "HELLO", 1)
        async with aclosing(one.tasks.follow(task)) as stream:
            types = [recorded.event.type async for recorded in stream]
        assert types == ["prompted", "task_started", "noted", "noted", "replied", "task_ended"]
        numbers = [step.number for step in await one.tasks.steps(task.id, account_id="bees")]
        assert numbers == [1, 2]


async def test_cancelling_ends_a_task_that_runs(worker: Open, hive: Hive) -> None:
    async with worker(stay) as one:
        task = await ask(one.tasks, hive)
        await until(lambda: task.id in one.running)
        await one.tasks.cancel(task.id, account_id="bees", actor="me", why="enough")
        task = await one.tasks.wait(task.id, account_id="bees", timeout_s=20)
        assert (task.status, task.error) == ("cancelled", "enough")
        await until(lambda: not one.running)


async def test_what_a_worker_leaves_is_gone_on_with_by_the_next(worker: Open, hive: Hive, database: Database) -> None:
    seen = []

    async def two(run: Run) -> Outcome:
        async def first() -> str:
            seen.append("first")
            return "one"

        async def second() -> str:
            seen.append("second")
            if seen.count("second") == 1:
                await asyncio.Event().wait()
            return "two"

        return Outcome("succeeded", "done", reply=await run.step("a", first) + await run.step("b", second))

    async with worker(two) as one:
        task = await ask(one.tasks, hive)
        await until(lambda: "second" in seen)
    async with worker(two) as one:
        task = await one.tasks.wait(task.id, account_id="bees", timeout_s=20)
    assert (task.status, task.reply, task.starts) == ("succeeded", "onetwo", 2)
    assert seen == ["first", "second", "second"]


async def test_a_fork_takes_over_the_steps_before_it(worker: Open, hive: Hive) -> None:
    async with worker(echo) as one:
        task = await ask(one.tasks, hive)
        task = await one.tasks.wait(task.id, account_id="bees", timeout_s=20)
        fork = await one.tasks.fork(task.id, 1, account_id="bees", actor="me")
        fork = await one.tasks.wait(fork.id, account_id="bees", timeout_s=20)
        assert (fork.status, fork.reply, fork.origin, fork.step) == ("succeeded", "HELLO", task.id, 1)
        async with aclosing(one.tasks.follow(fork)) as stream:
            types = [recorded.event.type async for recorded in stream]
        assert types == ["task_forked", "prompted", "task_started", "noted", "replied", "task_ended"]
        assert [step.number for step in await one.tasks.steps(fork.id, account_id="bees")] == [1, 2]
        with pytest.raises(InvalidRequest, match="no step 9"):
            await one.tasks.fork(task.id, 9, account_id="bees", actor="me")
        again = await one.tasks.retry(fork.id, account_id="bees", actor="me")
        again = await one.tasks.wait(again.id, account_id="bees", timeout_s=20)
        assert (again.status, again.step) == ("succeeded", 0)
