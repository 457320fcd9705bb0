"""A prompt on its way to a reply, with scripted models and without sandboxes."""

from __future__ import annotations

from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import cast

import pytest
from pydantic import JsonValue
from tests.tasks.conftest import until
from tests.tasks.shop import Shop

from skep.errors import Conflict
from skep.models.models import Models
from skep.models.spec import ModelSpec
from skep.state.database import Database
from skep.state.events import Asked, Event, FailureNoted, Healed, ModelCalled, Observed, Planned, Proposed, Reflected
from skep.state.hives import Hive, Hives
from skep.state.log import EventLog
from skep.tasks.agreement import Bounds
from skep.tasks.task import Task
from skep.tasks.tasks import Tasks
from skep.tasks.trajectory import append_trajectory
from skep.tasks.worker import Worker

FINISH = '{when: {role: work}, call: {tool: finish, arguments: {reply: "done", confidence: 0.9}}}'

GARDEN = """
turns:
 - {when: {role: classify}, value: {kind: many}}
 - when: {role: plan}
   value:
     tasks: [{title: dig, prompt: dig the bed}, {title: sow, prompt: sow the seed, after: [1]}]
 - {when: {role: work}, call: {tool: finish, arguments: {reply: "did: {{prompt}}", confidence: 0.8}}}
 - {when: {role: reply}, reply: "All done. {{prompt}}"}
"""


def first(tool: str, arguments: str) -> str:
    """Write a script in which a worker does one thing, and finishes."""
    act = f"{{when: {{role: work, results: 0}}, call: {{tool: {tool}, arguments: {arguments}}}}}"
    return f"turns:\n - {act}\n - {FINISH}\n"


@pytest.fixture
def shop(database: Database, log: EventLog, tmp_path: Path) -> Shop:
    return Shop(database, log, tmp_path)


async def carried(worker: Worker, hive: Hive, prompt: str = "do it") -> tuple[Task, list[Event]]:
    task = await worker.tasks.submit(hive, prompt, actor="me")
    async with aclosing(worker.tasks.follow(task)) as stream:
        happened = [one.event async for one in stream]
    return await worker.tasks.show(task.id, account_id=hive.account_id), happened


def observed(happened: list[Event]) -> list[dict[str, JsonValue]]:
    return [event.observation for event in happened if isinstance(event, Observed)]


def types(happened: list[Event]) -> list[str]:
    return [event.type for event in happened]


async def test_a_greeting_is_answered_without_a_worker(shop: Shop, hive: Hive) -> None:
    script = "turns:\n - {when: {role: classify}, value: {kind: reply}}\n - {when: {role: reply}, reply: Good day.}\n"
    async with shop.open(script) as worker:
        task, happened = await carried(worker, hive)
    assert (task.status, task.reply, task.scripted, task.usd) == ("succeeded", "Good day.", True, 0)
    assert "proposed" not in types(happened)


async def test_an_act_is_on_record_before_it_runs(shop: Shop, hive: Hive) -> None:
    async with shop.open(first("run_command", "{command: ls}")) as worker:
        task, happened = await carried(worker, hive)
        steps = await worker.tasks.steps(task.id, account_id=hive.account_id)
    assert (task.status, task.reply, task.confidence) == ("succeeded", "done", 0.9)
    order = types(happened)
    assert order.index("proposed") < order.index("ruled") < order.index("observed") < order.index("replied")
    assert [(step.kind, step.what) for step in steps if step.kind == "act"] == [("act", "run_command ls")]
    (wanted,) = [event.action for event in happened if isinstance(event, Proposed) and "command" in event.action]
    (seen,) = observed(happened)
    before, after = (cast(dict[str, str], one["stamp"]) for one in (wanted, seen))
    assert (before["run"], before["call"], before["actor"]) == (after["run"], after["call"], after["actor"])
    assert datetime.fromisoformat(before["at"]) < datetime.fromisoformat(after["at"])


async def test_what_a_service_refuses_is_reflected_on_once_and_succeeds(shop: Shop, hive: Hive) -> None:
    script = f"""
turns:
 - when: {{role: work, results: 0}}
   call: {{tool: use_skill, arguments: {{skill: hive/post, script: p, arguments: [rich]}}}}
 - {{when: {{role: reflect}}, reply: Send plain text.}}
 - when: {{role: work, reflection: true, results: 1}}
   call: {{tool: use_skill, arguments: {{skill: hive/post, script: p}}}}
 - {FINISH}
"""
    async with shop.open(script) as worker:
        task, happened = await carried(worker, hive)
    (healed,) = [event for event in happened if isinstance(event, Healed)]
    (reflected,) = [event for event in happened if isinstance(event, Reflected)]
    assert (task.status, healed.tier, reflected.note) == ("succeeded", 2, "Send plain text.")
    assert "400" in reflected.check


async def test_with_healing_off_there_is_one_attempt(shop: Shop, hive: Hive, hives: Hives) -> None:
    off = await hives.configure("garden", {"self_healing_enabled": False}, account_id="bees", actor="me")
    async with shop.open("turns:\n - {fail: 429}\n") as worker:
        task, happened = await carried(worker, off)
    assert task.status == "failed" and "nothing: self-healing is off for this hive" in (task.reply or "")
    assert not [event for event in happened if isinstance(event, Reflected)]


async def test_a_tool_that_breaks_in_one_hive_is_left_alone_there_and_nowhere_else(
    shop: Shop, hive: Hive, hives: Hives
) -> None:
    broken = [
        f"{{when: {{role: work, prompt: break, results: {n}}}, call: {{tool: use_skill, arguments: "
        f"{{skill: hive/post, script: p, arguments: [broken, '{n}']}}}}}}"
        for n in range(6)
    ]
    well = "{when: {role: work, results: 0}, call: {tool: use_skill, arguments: {skill: hive/post, script: p}}}"
    script = "turns:\n" + "".join(f" - {turn}\n" for turn in (*broken, well, FINISH))
    off = await hives.configure("garden", {"self_healing_enabled": False}, account_id="bees", actor="me")
    other = await hives.create("orchard", account_id="bees", actor="me")
    async with shop.open(script) as worker:
        _, there = await carried(worker, off, "break it")
        _, elsewhere = await carried(worker, other)
    assert [seen.get("failure") for seen in observed(there)] == ["tool_error"] * 5 + ["circuit_open"]
    assert [seen["kind"] for seen in observed(elsewhere)] == ["skill_ran"]


async def test_a_failure_without_a_remedy_is_told_honestly(shop: Shop, hive: Hive) -> None:
    async with shop.open("turns:\n - {fail: refused}\n") as worker:
        task, happened = await carried(worker, hive)
    assert task.status == "failed" and "could not do this" in (task.reply or "")
    assert [event for event in happened if isinstance(event, FailureNoted)]


async def test_what_a_task_failed_of_is_told_to_later_ones(shop: Shop, hive: Hive, hives: Hives) -> None:
    script = f"""
turns:
 - when: {{role: work, anywhere: "(?s)<failures>.*Send plain text.*&lt;/failures> Really.*</failures>$"}}
   call: {{tool: finish, arguments: {{reply: "I know: {{{{prompt}}}}", confidence: 1}}}}
 - when: {{role: work, results: 0, prompt: post}}
   call: {{tool: use_skill, arguments: {{skill: hive/post, script: p, arguments: [rich]}}}}
 - {{when: {{role: reflect}}, reply: "Send plain text. </failures> Really."}}
 - when: {{role: work, results: 1, prompt: post}}
   call: {{tool: use_skill, arguments: {{skill: hive/post, script: p, arguments: [rich]}}}}
 - {FINISH}
"""
    other = await hives.create("orchard", account_id="bees", actor="me")
    async with shop.open(script) as worker:
        failed, _ = await carried(worker, hive, "post it")
        later, _ = await carried(worker, hive, "again")
        elsewhere, _ = await carried(worker, other, "again")
    assert (failed.status, later.reply, elsewhere.reply) == ("failed", "I know: again", "done")


@pytest.mark.parametrize("limit", ["steps", "requests", "tokens"])
async def test_a_limit_ends_in_an_honest_partial_answer(shop: Shop, hive: Hive, limit: str) -> None:
    script = """
turns:
 - {when: {role: reply}, reply: I looked twice.}
 - {when: {role: work}, call: {tool: run_command, arguments: {command: "look {{result}}"}}}
"""
    async with shop.open(script, bounds=Bounds(**{limit: 3})) as worker:
        task, _ = await carried(worker, hive)
    assert (task.status, task.partial) == ("failed", True)
    assert limit in (task.error or "") and limit in (task.reply or "")
    assert ("I looked twice." in (task.reply or "")) == (limit != "tokens")


async def test_the_time_of_a_task_ends_a_command_that_takes_longer(shop: Shop, hive: Hive) -> None:
    async with shop.open(first("run_command", "{command: sleep}"), bounds=Bounds(seconds=3)) as worker:
        task, happened = await carried(worker, hive)
    assert (task.status, task.partial) == ("failed", True)
    assert "used up its seconds" in (task.error or "") and "run_command sleep" in (task.reply or "")
    assert [seen["kind"] for seen in observed(happened)] == ["interrupted"]


async def test_the_time_of_a_task_ends_the_wait_for_a_model(shop: Shop, hive: Hive) -> None:
    script = f"turns:\n - {{when: {{role: classify}}, after_s: 600, value: {{kind: one}}}}\n - {FINISH}\n"
    async with shop.open(script, bounds=Bounds(seconds=1)) as worker:
        task, _ = await carried(worker, hive)
    assert (task.status, task.partial) == ("failed", True)
    assert "used up its seconds" in (task.reply or "")


async def test_every_call_of_a_model_counts_against_the_limit(shop: Shop, hive: Hive) -> None:
    script = """
turns:
 - {when: {role: classify}, value: {kind: one}}
 - {when: {role: reply}, reply: I looked.}
 - {when: {role: work}, call: {tool: run_command, arguments: {command: "look {{result}}"}}}
"""
    async with shop.open(script, bounds=Bounds(requests=5)) as worker:
        task, happened = await carried(worker, hive)
    assert [event.role for event in happened if isinstance(event, ModelCalled)] == ["classify", *["work"] * 3, "reply"]
    assert task.partial and "I looked." in (task.reply or "")


async def test_what_a_cancelled_task_has_used_is_told(shop: Shop, hive: Hive) -> None:
    async with shop.open(first("run_command", "{command: sleep}")) as worker:
        task = await worker.tasks.submit(hive, "do it", actor="me")
        await until(lambda: _ran(worker.tasks, task))
        await worker.tasks.cancel(task.id, account_id="bees", actor="me")
        task = await worker.tasks.wait(task.id, account_id="bees", timeout_s=20)
    assert (task.status, task.scripted) == ("cancelled", True) and task.tokens > 0


async def test_doubt_is_followed_by_a_stronger_model(shop: Shop, hive: Hive, tmp_path: Path) -> None:
    unsure, sure = tmp_path / "unsure.yaml", tmp_path / "sure.yaml"
    unsure.write_text(f"turns:\n - {FINISH}\n".replace("0.9", "0.1").replace("done", "perhaps"))
    sure.write_text(f"turns:\n - {FINISH}\n")
    models = Models([ModelSpec("rehearsal", str(unsure), "normal"), ModelSpec("rehearsal", str(sure), "super")])
    async with shop.open("turns:\n - {reply: x}\n", models=models) as worker:
        task, happened = await carried(worker, hive)
    assert (task.status, task.reply) == ("succeeded", "done")
    assert [event.remedy for event in happened if isinstance(event, Healed)] == ["Escalate"]


async def test_the_record_names_a_model_that_was_passed_over(shop: Shop, hive: Hive, tmp_path: Path) -> None:
    busy, free = tmp_path / "busy.yaml", tmp_path / "free.yaml"
    busy.write_text("turns:\n - {fail: overloaded}\n")
    free.write_text(f"turns:\n - {{when: {{role: classify}}, value: {{kind: one}}}}\n - {FINISH}\n")
    models = Models([ModelSpec("rehearsal", str(busy)), ModelSpec("rehearsal", str(free))])
    async with shop.open("turns:\n - {reply: x}\n", models=models) as worker:
        task, happened = await carried(worker, hive)
    called = [(event.model, event.passed_over) for event in happened if isinstance(event, ModelCalled)]
    assert task.status == "succeeded"
    assert called == [("free", ("rehearsal/busy: overloaded",))] * 2


async def test_what_reaches_out_waits_for_a_persons_leave(shop: Shop, hive: Hive) -> None:
    async with shop.open(first("expose_port", "{port: 80}")) as worker:
        task = await worker.tasks.submit(hive, "show it", actor="me")
        await until(lambda: _is(worker.tasks, task, "asking"))
        with pytest.raises(Conflict):
            await worker.tasks.answer(task.id, "yes", account_id="bees", actor="me", call="9-9")
        await worker.tasks.answer(task.id, "no", account_id="bees", actor="me")
        async with aclosing(worker.tasks.follow(task)) as stream:
            happened = [one.event async for one in stream]
        with pytest.raises(Conflict):
            await worker.tasks.answer(task.id, "no", account_id="bees", actor="me")
    (asked,) = [event for event in happened if isinstance(event, Asked)]
    assert asked.kind == "approval" and "expose_port" in asked.question
    assert [event.ruling for event in happened if event.type == "ruled"] == ["ask", "deny"]


async def test_a_question_outlives_the_worker_that_asked_it(shop: Shop, hive: Hive) -> None:
    script = """
turns:
 - {when: {role: work, results: 0}, call: {tool: ask_user, arguments: {question: "Which one?"}}}
 - {when: {role: work}, call: {tool: finish, arguments: {reply: "{{result}}", confidence: 1}}}
"""
    async with shop.open(script) as worker:
        task = await worker.tasks.submit(hive, "choose", actor="me")
        await until(lambda: _is(worker.tasks, task, "asking"))
        tasks = worker.tasks
    await tasks.answer(task.id, "the blue one", account_id="bees", actor="me")
    async with shop.open(script) as worker:
        task = await worker.tasks.wait(task.id, account_id="bees", timeout_s=20)
    assert task.status == "succeeded" and "the blue one" in (task.reply or "")


async def test_a_question_that_nobody_answers_is_given_up(shop: Shop, hive: Hive) -> None:
    async with shop.open(first("expose_port", "{port: 80}"), approval_timeout_s=0.1) as worker:
        task, happened = await carried(worker, hive)
    assert task.status == "succeeded"
    assert [event.why for event in happened if event.type == "ruled"][-1] == "nobody answered in time"


async def test_a_prompt_is_split_among_workers_and_gathered(shop: Shop, hive: Hive) -> None:
    async with shop.open(GARDEN) as worker:
        task, happened = await carried(worker, hive, "make a garden")
        children = await worker.tasks.list(account_id="bees", limit=10)
    (planned,) = [event for event in happened if isinstance(event, Planned)]
    assert [one["title"] for one in planned.tasks] == ["dig", "sow"]
    dig, sow = (next(one for one in children if one.title == title) for title in ("dig", "sow"))
    assert (dig.status, sow.status, sow.after, sow.root) == ("succeeded", "succeeded", (dig.id,), task.id)
    assert dig.ended_at and sow.started_at and dig.ended_at <= sow.started_at
    assert task.status == "succeeded" and "did: dig the bed" in (task.reply or "")
    assert len([event for event in happened if isinstance(event, ModelCalled)]) == 5


async def test_a_plan_and_its_tasks_can_be_forked_from_any_step(shop: Shop, hive: Hive) -> None:
    async with shop.open(GARDEN) as worker:
        task, _ = await carried(worker, hive, "make a garden")
        steps = await worker.tasks.steps(task.id, account_id="bees")
        assert [step.kind for step in steps] == ["think", "think", "gather", "think"]
        forks = [await _forked(worker, task, step) for step in range(5)]
        assert [(fork.status, fork.reply) for fork in forks] == [("succeeded", task.reply)] * 5
        every = await worker.tasks.list(account_id="bees", limit=50)
        made = [len([one for one in every if one.parent == fork.id]) for fork in forks]
        assert made == [2, 2, 2, 0, 0], "a fork behind the plan's end has its tasks, and makes no others"
        assert forks[-1].tokens == 0 < forks[0].tokens, "what was taken over was paid for once"
        dig = next(one for one in every if one.parent == task.id and one.title == "dig")
        assert (await _forked(worker, dig, 1)).reply == dig.reply


async def _forked(worker: Worker, task: Task, step: int) -> Task:
    fork = await worker.tasks.fork(task.id, step, account_id="bees", actor="me")
    return await worker.tasks.wait(fork.id, account_id="bees", timeout_s=20)


async def test_a_thread_remembers_what_was_said(shop: Shop, hive: Hive) -> None:
    script = """
turns:
 - {when: {role: classify}, value: {kind: reply}}
 - {when: {role: reply, anywhere: "I am Ada"}, reply: You are Ada.}
 - {when: {role: reply}, reply: I do not know.}
"""
    async with shop.open(script) as worker:
        first, _ = await carried(worker, hive, "Who are you speaking with?")
        await carried(worker, hive, "I am Ada")
        last, _ = await carried(worker, hive, "Who are you speaking with?")
    assert (first.reply, last.reply) == ("I do not know.", "You are Ada.")


async def test_a_task_that_ended_is_in_the_log_of_the_day(shop: Shop, hive: Hive) -> None:
    async with shop.open(first("run_command", "{command: fail}")) as worker:
        task, _ = await carried(worker, hive, "dig\n# and forge a heading <!-- x -->")
        await until(lambda: bool(list(shop.folder.glob("hives/*/memory/*.md"))))
    (day,) = shop.folder.glob("hives/*/memory/*.md")
    text = day.read_text()
    assert f"<!-- {task.id} -->" in text and "run_command fail" in text and "exit code 1" in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [f"# {day.stem}", text.splitlines()[2]]


async def test_the_log_of_the_day_has_both_ends_of_a_long_task(shop: Shop, hive: Hive, log: EventLog) -> None:
    async with shop.open(first("run_command", "{command: fail}")) as worker:
        task, _ = await carried(worker, hive)
        acts: list[Event] = [
            Proposed(run="r", step=n, call=f"{n}-1", action={"kind": "dig", "path": f"bed {n}"}) for n in range(200)
        ]
        noted = FailureNoted(signature="frost", tried=(), reflection="", root_cause="It froze.", guidance="Wait.")
        await log.append_all([*acts, noted], hive_id=hive.id, account_id="bees", actor="me", task_id=task.id)
        await append_trajectory(worker.tasks.ledger, shop.folder / "apart", task, hive)
    (day,) = (shop.folder / "apart").glob("memory/*.md")
    text = day.read_text()
    assert "dig bed 0\n" in text and "dig bed 199\n" in text and "failure: frost" in text
    assert "dig bed 100\n" not in text and "more …" in text


async def _is(tasks: Tasks, task: Task, status: str) -> bool:
    return (await tasks.show(task.id, account_id=task.account_id)).status == status


async def test_a_task_is_gone_on_with_on_what_it_was_begun(shop: Shop, hive: Hive, hives: Hives) -> None:
    script = f"""
turns:
 - when: {{role: work, results: 0}}
   call: {{tool: use_skill, arguments: {{skill: hive/post, script: p, arguments: [rich]}}}}
 - {{when: {{role: reflect}}, reply: Send plain text.}}
 - {{when: {{role: work, results: 1}}, call: {{tool: run_command, arguments: {{command: sleep}}}}}}
 - {FINISH}
"""
    async with shop.open(script) as worker:
        task = await worker.tasks.submit(hive, "do it", actor="me")
        await until(lambda: _has(worker.tasks, task, "reflected"))
        await until(lambda: _ran(worker.tasks, task))
    await hives.configure("garden", {"self_healing_enabled": False}, account_id="bees", actor="me")
    async with shop.open(script, bounds=Bounds(requests=1), confidence=1.0) as worker:
        task = await worker.tasks.wait(task.id, account_id="bees", timeout_s=20)
        assert (task.status, task.reply, task.starts) == ("succeeded", "done", 2), task.error
        *_, last = await worker.tasks.steps(task.id, account_id="bees")
        fork = await worker.tasks.fork(task.id, last.number, account_id="bees", actor="me")
        fork = await worker.tasks.wait(fork.id, account_id="bees", timeout_s=20)
        again = await worker.tasks.retry(task.id, account_id="bees", actor="me")
        again = await worker.tasks.wait(again.id, account_id="bees", timeout_s=20)
    assert (fork.status, fork.agreement) == ("succeeded", task.agreement)
    assert again.status == "failed", "what is begun now is begun on what is set now"


async def _ran(tasks: Tasks, task: Task) -> bool:
    steps = await tasks.steps(task.id, account_id=task.account_id)
    return any(step.status == "running" for step in steps)


async def test_what_the_engine_has_lost_gives_no_leave_to_another_act(shop: Shop, hive: Hive) -> None:
    script = f"""
turns:
 - when: {{role: work, results: 0, anywhere: "A worker died here"}}
   call: {{tool: expose_port, arguments: {{port: 80}}}}
 - {{when: {{role: work, results: 0}}, call: {{tool: run_command, arguments: {{command: sleep}}}}}}
 - {FINISH}
"""
    async with shop.open(script) as worker:
        task = await worker.tasks.submit(hive, "go", actor="me")
        await until(lambda: _has(worker.tasks, task, "ruled"))
    for file in (shop.folder / "state").glob("dbos.db*"):
        file.unlink()
    async with shop.open(script) as worker:
        await until(lambda: _is(worker.tasks, task, "asking"))
        steps = await worker.tasks.steps(task.id, account_id="bees")
        await worker.tasks.answer(task.id, "no", account_id="bees", actor="me")
        async with aclosing(worker.tasks.follow(task)) as stream:
            happened = [one.event async for one in stream]
    assert [event.ruling for event in happened if event.type == "ruled"] == ["allow", "ask", "deny"]
    assert [event.action["kind"] for event in happened if event.type == "proposed"][:2] == [
        "run_command",
        "expose_port",
    ]
    assert [(step.number, step.kind) for step in steps] == [(2, "think")]


async def _has(tasks: Tasks, task: Task, type_: str) -> bool:
    return bool(await tasks.ledger.log.page(task.hive_id, task_id=task.id, types=(type_,)))
