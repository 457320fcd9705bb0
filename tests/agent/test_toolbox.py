"""A call of a model's is read strictly; as a pydantic-ai toolset the tools are ruled on as well."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from tests.agent.conftest import stamp
from tests.agent.scripted import TOOLBOX, no_desk

from skep.agent.actions import ACTIONS, RunCommand, read_action
from skep.agent.observations import Trouble
from skep.agent.toolbox import Toolbox


def test_a_model_is_told_the_arguments_of_each_tool_and_nothing_of_ours() -> None:
    told = {tool.name: tool for tool in Toolbox(browser=True).definitions}
    assert told.keys() == ACTIONS.keys()
    for tool in told.values():
        assert tool.description and not {"stamp", "kind"} & tool.parameters_json_schema["properties"].keys()
    assert told["edit_file"].parameters_json_schema["required"] == ["path", "old", "new"]


def test_a_browser_is_offered_only_where_the_hive_has_one() -> None:
    assert "browse" not in {tool.name for tool in Toolbox().definitions}


def test_a_command_reaches_out_only_where_the_hive_may() -> None:
    for network, reach in ((False, "inside"), (True, "listed")):
        toolbox = Toolbox(network=network)
        action = toolbox.parse(ToolCallPart("run_command", {"command": "ls"}), stamp())
        assert isinstance(action, RunCommand)
        asked = toolbox.asked(action)
        assert (asked.reach, asked.summary) == (reach, 'run_command {"command":"ls"}')


def test_an_action_survives_being_written_down() -> None:
    action = TOOLBOX.parse(ToolCallPart("finish", {"reply": "é", "confidence": 1}), stamp())
    assert not isinstance(action, Trouble) and read_action(action.model_dump(mode="json")) == action


@pytest.mark.parametrize("reply", ["", " \n\t"])
def test_a_task_cannot_be_finished_without_a_reply(reply: str) -> None:
    read = TOOLBOX.parse(ToolCallPart("finish", {"reply": reply, "confidence": 1}), stamp())
    assert isinstance(read, Trouble) and read.failure == "invalid_arguments" and "reply" in read.message


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ('{"path": "a"', "not JSON"),
        ('{"path": "a", "path": "b"}', "'path' is there twice"),
        ('{"path": "a", "colour": 1}', "colour: Extra inputs"),
        ('{"path": "a", "stamp": {}}', "stamp is not an argument"),
        ('{"path": "a", "kind": "finish"}', "kind is not an argument"),
        ('{"path": "a", "start": NaN}', "NaN is not a number"),
        ('{"path": "\\ud800"}', "surrogates not allowed"),
        ('{"path": 7}', "path: Input should be a valid string"),
        ("null", "have to be a JSON object"),
        ("[" * 100_000, "arguments"),
        ("{}", "path: Field required"),
    ],
)
def test_arguments_that_are_not_as_told_are_refused_with_the_reason(arguments: str, complaint: str) -> None:
    read = TOOLBOX.parse(ToolCallPart("read_file", arguments), stamp())
    assert isinstance(read, Trouble) and read.failure == "invalid_arguments"
    assert complaint in read.message or complaint == "arguments", read.message
    assert len(read.message) < 1_000


async def test_in_an_agent_of_pydantic_ai_it_performs_what_is_allowed_and_nothing_more() -> None:
    said: list[Any] = []

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        assert {tool.name for tool in info.function_tools} >= {"read_file", "finish"}
        if len(messages) == 1:
            return ModelResponse([ToolCallPart("read_file", {"path": "a"}), ToolCallPart("expose_port", {"port": 80})])
        said.extend(part.content for part in messages[-1].parts if isinstance(part, ToolReturnPart))
        return ModelResponse([TextPart("read")])

    agent = Agent(FunctionModel(model), deps_type=type(no_desk()), toolsets=[TOOLBOX])
    assert (await agent.run("Read a.", deps=no_desk())).output == "read"
    assert "text of a" in said[0] and "reaches beyond the sandbox" in said[1]
