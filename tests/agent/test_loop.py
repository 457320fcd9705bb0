"""The loop rules before it acts, stops where it should, and leaves a conversation that can be gone on with."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart
from tests.agent.scripted import Script, Scripted, brief, call, carry, finish, read

from skep.agent.conversation import Conversation
from skep.agent.loop import Finished, Limits, Stopped
from skep.errors import LeaseLost, ModelUnavailable
from skep.governance.ruling import Policy
from skep.state.events import LoopWarned, Observed, Proposed, Ruled


def unanswered(talk: Conversation) -> set[str]:
    """Return the calls in a conversation that have no result, with which no provider would take it."""
    parts = [part for message in talk.messages for part in message.parts]
    calls = {part.tool_call_id for part in parts if isinstance(part, ToolCallPart)}
    return calls - {part.tool_call_id for part in parts if isinstance(part, ToolReturnPart)}


async def test_each_act_is_proposed_ruled_on_done_and_observed() -> None:
    steps = Scripted([[read()], [finish("It says so.")]])
    happened, ending = await carry(brief(), steps)
    assert [type(one) for one in happened] == [Proposed, Ruled, Observed, Proposed]
    assert ending == Finished("It says so.", 0.9, "done")
    last = steps.seen[1][-1]
    assert isinstance(last, ModelRequest) and isinstance(last.parts[0], ToolReturnPart)
    assert "text of a" in str(last.parts[0].content)


async def test_nothing_runs_before_its_ruling_was_taken() -> None:
    steps = Scripted([[read(), read("b")], [finish()]])
    done_when_ruled: list[int] = []

    def note(one: object) -> None:
        if isinstance(one, Ruled):
            done_when_ruled.append(len(steps.acted))

    await carry(brief(), steps, each=note)
    assert done_when_ruled == [0, 1]


@pytest.mark.parametrize(
    ("approves", "policy", "rulings", "acts"),
    [
        (True, Policy(), ["ask", "allow"], ["expose_port"]),
        (False, Policy(), ["ask", "deny"], []),
        (True, Policy(denied=frozenset({"expose_port"})), ["deny"], []),
    ],
)
async def test_what_reaches_out_runs_only_when_it_may(
    approves: bool, policy: Policy, rulings: list[str], acts: list[str]
) -> None:
    steps = Scripted([[call("expose_port", port=80)], [finish()]], policy=policy, approves=approves)
    happened, ending = await carry(brief(), steps)
    assert [one.ruling for one in happened if isinstance(one, Ruled)] == rulings
    assert steps.acted == acts and isinstance(ending, Finished)


@pytest.mark.parametrize(
    ("limits", "which"),
    [
        (Limits(steps=2), "steps"),
        (Limits(requests=2), "requests"),
        (Limits(tokens=250), "tokens"),
        (Limits(usd=0.015), "usd"),
        (Limits(seconds=2), "seconds"),
    ],
)
async def test_each_limit_ends_the_work_by_its_name(limits: Limits, which: str) -> None:
    work = brief()
    _, ending = await carry(work, Scripted([[read("a"), read("b")], [read("c"), read("d")]] * 3), limits)
    assert isinstance(ending, Stopped) and (ending.failure, ending.which) == ("limit", which)
    assert not unanswered(work.conversation)


async def test_a_worker_may_still_finish_when_its_acts_are_used_up() -> None:
    _, ending = await carry(brief(), Scripted([[read("a"), read("b"), finish()]]), Limits(steps=2))
    assert isinstance(ending, Finished)


async def test_trouble_that_others_deal_with_stops_the_attempt_and_the_next_goes_on_from_there() -> None:
    work = brief(stops_on=frozenset({"tool_timeout"}))
    steps = Scripted([[read()], [call("list_files"), read("never")], [finish()]])
    _, ending = await carry(work, steps)
    assert isinstance(ending, Stopped) and ending.failure == "tool_timeout"
    assert ending.call is not None and ending.call.action.kind == "list_files"
    assert steps.acted == ["read_file", "list_files"] and not unanswered(work.conversation)
    work.conversation.say("<reflection>Do not list.</reflection>")
    happened, ending = await carry(work, steps)
    assert isinstance(ending, Finished) and steps.acted == ["read_file", "list_files"]
    assert [one.call for one in happened if isinstance(one, Proposed)] == ["3-1"]


async def test_trouble_that_nobody_else_deals_with_is_told_to_the_model() -> None:
    steps = Scripted([[call("list_files")], [finish()]])
    _, ending = await carry(brief(), steps)
    assert isinstance(ending, Finished) and "took too long" in str(steps.seen[1][-1])


@pytest.mark.parametrize("arguments", ['{"path": ', '{"path": "a", "colour": "red"}', '["a"]'])
async def test_a_call_that_cannot_be_read_is_explained_a_few_times(arguments: str) -> None:
    happened, ending = await carry(brief(), Scripted([[call("read_file", arguments)], [read()], [finish()]]))
    assert isinstance(ending, Finished)
    [first, *_] = [one for one in happened if isinstance(one, Observed)]
    assert first.observation["failure"] == "invalid_arguments"
    steps = Scripted([[call("read_file", arguments)]])
    _, ending = await carry(brief(), steps)
    assert isinstance(ending, Stopped) and ending.failure == "invalid_arguments" and len(steps.seen) == 3


async def test_an_unknown_tool_is_answered_with_those_there_are() -> None:
    steps = Scripted([[call("drop table; x" * 20, path="a")], [finish()]])
    _, ending = await carry(brief(), steps)
    assert isinstance(ending, Finished) and "read_file" in str(steps.seen[1][-1])
    [heard] = [part for message in steps.seen[1] if isinstance(message, ModelResponse) for part in message.parts]
    assert isinstance(heard, ToolCallPart) and len(heard.tool_name) <= 64 and heard.tool_name.isidentifier()


@pytest.mark.parametrize(
    ("script", "pattern"),
    [([[read()]], "same_call"), (["Let me think."], "monologue"), ([[]], "monologue")],
)
async def test_a_worker_in_circles_is_warned_and_then_stopped(script: list[Any], pattern: str) -> None:
    steps = Scripted(script)
    happened, ending = await carry(brief(), steps)
    warnings = [one for one in happened if isinstance(one, LoopWarned)]
    assert [one.pattern for one in warnings] == [pattern, pattern]
    assert isinstance(ending, Stopped) and (ending.failure, ending.which) == ("loop", pattern)
    assert warnings[0].guidance in str(steps.seen[-1])


async def test_a_model_that_fails_is_asked_again_with_nothing_lost_or_done_twice() -> None:
    work, steps = brief(), Scripted([[read()], ModelUnavailable("overloaded"), [finish()]])
    with pytest.raises(ModelUnavailable):
        await carry(work, steps)
    _, ending = await carry(work, steps)
    assert isinstance(ending, Finished) and steps.acted == ["read_file"]
    assert steps.seen[1] == steps.seen[2]


async def test_a_step_that_breaks_leaves_a_conversation_that_can_be_gone_on_with() -> None:
    work, steps = brief(), Scripted([[read(), call("ask_user", question="?")], [finish()]], breaks_on="ask_user")
    with pytest.raises(LeaseLost):
        await carry(work, steps)
    work.conversation.say("Go on.")
    assert not unanswered(work.conversation)
    assert isinstance((await carry(work, steps))[1], Finished)


async def test_the_same_steps_give_the_same_events_again() -> None:
    script: Script = [
        [read("a"), call("nothing")],
        [call("list_files")],
        "hm",
        [read()],
        [read()],
        [read()],
        [finish()],
    ]
    first, second = await carry(brief(), Scripted(script)), await carry(brief(), Scripted(script))
    assert first == second
