"""Scripts: which turn is taken, that it is the same turn in every process, and what is said of a bad script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)

from skep.errors import ScriptInvalid
from skep.models.exchange import Answer, Request
from skep.models.failures import ModelFailure
from skep.models.messages import dump_messages, load_messages
from skep.models.models import Models
from skep.models.rehearsal import RehearsalModel
from skep.models.script import built_in, load_script, read_script
from skep.models.spec import ModelSpec, Role


class Verdict(BaseModel):
    kind: str


def asked(prompt: str) -> ModelRequest:
    return ModelRequest(parts=[UserPromptPart(prompt)])


def called(*results: str, tool: str = "run_command") -> list[ModelMessage]:
    """Make a conversation in which a tool was called once for each result."""
    said: list[ModelMessage] = [asked("Do it.")]
    for number, result in enumerate(results):
        said.append(ModelResponse(parts=[ToolCallPart(tool, {}, f"call_{number}")]))
        said.append(ModelRequest(parts=[ToolReturnPart(tool, result, f"call_{number}")]))
    return said


class Stage:
    """A script in a file, and a program that plays it: a new one for each request, as after a crash."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "play.yaml"

    def write(self, text: str) -> None:
        self.path.write_text(text)

    async def ask(
        self,
        messages: Sequence[ModelMessage] = (asked("Hello"),),
        *,
        role: Role = "work",
        tries: int | None = None,
        schema: type[BaseModel] | None = None,
    ) -> Answer:
        request = Request(role, messages, tries=tries, schema=schema)
        return await Models([ModelSpec("rehearsal", str(self.path))]).ask(request)

    async def said(self, messages: Sequence[ModelMessage] = (asked("Hello"),), *, role: Role = "work") -> str | None:
        return (await self.ask(messages, role=role)).response.text


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


async def test_an_answer_says_that_it_is_scripted_costs_nothing_and_names_its_turn(stage: Stage) -> None:
    stage.write("turns: [{reply: 'You said {{prompt}}.'}]")
    answer = await stage.ask()
    assert answer.response.text == "You said Hello."
    assert answer.scripted
    assert answer.spend.usd == 0
    assert answer.spend.tokens > 0
    assert (answer.spend.provider, answer.spend.model) == ("rehearsal", "play")
    assert answer.response.provider_details == {"scripted": True, "script": "play", "turn": 1}


async def test_what_a_named_group_has_found_can_be_repeated(stage: Stage) -> None:
    stage.write("turns: [{when: {prompt: '(?P<word>H[a-z]+)'}, reply: '{{word}}, {{word}} {{other}}'}]")
    assert (await stage.ask()).response.text == "Hello, Hello {{other}}"


async def test_the_first_turn_whose_conditions_hold_is_taken(stage: Stage) -> None:
    stage.write("""
turns:
  - {when: {role: [classify, plan]}, reply: role}
  - {when: {prompt: '(?i)^good\\s'}, reply: prompt}
  - {when: {tool: read_file}, reply: tool}
  - {when: {result: 'exit 1'}, reply: result}
  - {when: {results: 2}, reply: results}
  - {when: {reflection: true}, reply: reflection}
  - {when: {anywhere: 'be brief'}, reply: anywhere}
  - {when: {reflection: false}, reply: otherwise}
""")
    brief = ModelRequest(parts=[SystemPromptPart("You are to be brief.")])
    reflected = asked("<reflection>Send plain text.</reflection>")
    assert await stage.said(role="plan") == "role"
    assert await stage.said([asked("Good morning")]) == "prompt"
    assert await stage.said([asked("Good morning"), reflected]) == "prompt"
    assert await stage.said(called("all well", tool="read_file")) == "tool"
    assert await stage.said(called("exit 0", "exit 1")) == "result"
    assert await stage.said(called("exit 1", "exit 0")) == "results"
    assert await stage.said([asked("Hello"), reflected]) == "reflection"
    assert await stage.said([brief, asked("Hello")]) == "anywhere"
    assert await stage.said() == "otherwise"


async def test_a_conversation_remembers_its_turns_and_goes_on_in_another_process(stage: Stage) -> None:
    stage.write("""
turns:
  - {times: 1, call: {tool: run_command, arguments: {command: 'echo one'}}}
  - {times: 2, call: [{tool: read_file, arguments: {path: '{{result}}'}}, {tool: list_files}]}
  - {reply: 'done: {{result}}'}
""")
    messages: list[ModelMessage] = [asked("Hello")]
    taken, ids = [], []
    for number in range(4):
        messages = load_messages(dump_messages(messages))
        answer = await stage.ask(messages)
        assert (await stage.ask(messages)).response.parts == answer.response.parts
        taken.append((answer.response.provider_details or {})["turn"])
        ids += [call.tool_call_id for call in answer.response.tool_calls]
        results = [ToolReturnPart(c.tool_name, f"result {number}", c.tool_call_id) for c in answer.response.tool_calls]
        messages += [answer.response, ModelRequest(parts=results)]
    assert taken == [1, 2, 2, 3]
    assert len(set(ids)) == len(ids) == 5
    assert answer.response.text == "done: result 2\nresult 2"


async def test_a_value_fits_whatever_form_the_request_has(stage: Stage) -> None:
    stage.write("turns: [{value: {kind: 'a {{prompt}}'}}]")
    assert (await stage.ask(schema=Verdict)).value == Verdict(kind="a Hello")
    told = ModelSpec("rehearsal", str(stage.path), supports_json=False)
    answer = await Models([told]).ask(Request("classify", [asked("Hello")], schema=Verdict))
    assert answer.value == Verdict(kind="a Hello")


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        ("429, retry_after_s: 3", "rate_limit"),
        ("500", "server_error"),
        ("503", "overloaded"),
        ("overloaded", "overloaded"),
        ("timeout", "timeout"),
        ("cut", "cut"),
        ("malformed", "malformed"),
        ("context_overflow", "context_overflow"),
        ("refused", "refused"),
    ],
)
async def test_a_failure_of_a_script_has_the_name_of_a_real_one(stage: Stage, fail: str, kind: str) -> None:
    stage.write(f"turns: [{{fail: {fail}}}]")
    with pytest.raises(ModelFailure) as caught:
        await stage.ask()
    assert caught.value.kind == kind
    assert caught.value.retry_after_s == (3 if kind == "rate_limit" else None)


FAILING = "turns: [{times: 2, fail: 429}, {times: 1, fail: 500}, {reply: At last.}]"


async def test_failures_come_as_often_as_the_caller_has_not_met_them(stage: Stage) -> None:
    stage.write(FAILING)
    kinds = []
    for tries in range(3):
        with pytest.raises(ModelFailure) as caught:
            await stage.ask(tries=tries)
        kinds.append(caught.value.kind)
    assert kinds == ["rate_limit", "rate_limit", "server_error"]
    assert (await stage.ask(tries=3)).response.text == "At last."


async def test_failures_are_counted_for_a_caller_that_does_not(stage: Stage) -> None:
    stage.write(FAILING)
    models = Models([ModelSpec("rehearsal", str(stage.path))])
    for _ in range(3):
        with pytest.raises(ModelFailure):
            await models.ask(Request("work", [asked("Hello")]))
    assert (await models.ask(Request("work", [asked("Hello")]))).response.text == "At last."
    with pytest.raises(ModelFailure):
        await models.ask(Request("work", [asked("Something else")]))


async def test_a_script_that_has_nothing_to_say_says_to_what(stage: Stage) -> None:
    stage.write("turns: [{when: {role: plan}, reply: Well.}]")
    with pytest.raises(ModelFailure, match=r"no turn for role work after 'Hello'") as caught:
        await stage.ask()
    assert caught.value.kind == "refused"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("turns:\n  - reply: [", "line 2: "),
        ("turns:\n  - reply: Hi\n  - rply: Hi\n", "line 3: turns[1].rply: "),
        ("turns:\n  - reply: Hi\n    when:\n      prompt: '('\n", "line 4: turns[0].when.prompt: is not a regular"),
        ("turns:\n  - when: {role: wrok}\n    reply: Hi\n", "line 2: turns[0].when.role: input should be 'classify'"),
        ("turns:\n  - reply: Hi\n    fail: 429\n", "line 2: turns[0]: should have a reply, a call"),
        ("turns:\n\n  - times: 1\n", "line 3: turns[0]: should have a reply, a call"),
        ("turns:\n  - fail: 418\n", "line 2: turns[0].fail: input should be"),
        ("turns:\n  - call: {arguments: {}}\n", "line 2: turns[0].call.tool: field required"),
        ("turns: []\n", "line 1: turns: "),
        ("", "line 1: the script: "),
        ("- reply: Hi\n", "line 1: the script: "),
        ("turns: !!python/object/apply:os.getcwd []\n", "line 1: "),
    ],
)
def test_a_mistake_is_told_with_its_line(text: str, told: str) -> None:
    with pytest.raises(ScriptInvalid) as caught:
        read_script(text.encode(), "play.yaml")
    assert told in caught.value.message.replace("play.yaml, ", "")
    assert caught.value.message.startswith("play.yaml, ")


def test_a_script_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ScriptInvalid, match="No such file") as caught:
        load_script("/nowhere/play.yaml")
    assert "hello" in (caught.value.hint or "")


@pytest.mark.parametrize("name", built_in())
def test_every_script_that_ships_can_be_read(name: str) -> None:
    assert load_script(name).about


def test_the_script_that_the_guide_shows_can_be_read() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "models.md"
    shown = re.findall(r"^```yaml\n(.*?)^```$", guide.read_text(), re.MULTILINE | re.DOTALL)
    assert [len(read_script(text.encode(), "guide.yaml").turns) for text in shown] == [3]


async def test_the_model_works_in_an_agent_of_pydantic_ai() -> None:
    text = "turns: [{times: 1, call: {tool: add, arguments: {a: 1, b: 2}}}, {reply: 'It is {{result}}.'}]"
    agent = Agent(RehearsalModel(read_script(text.encode(), "sum.yaml")))

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        return a + b

    assert (await agent.run("What is 1 + 2?")).output == "It is 3."
