"""One call over real HTTP, in each protocol: what comes back, and what each fault is called."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from decimal import Decimal

import pytest
from pydantic import BaseModel
from pydantic_ai import ToolDefinition
from pydantic_ai.messages import ModelRequest
from tests.models.servers import (
    LONG,
    MODEL_IDS,
    OVERLOADED,
    RATE_LIMIT,
    SERVER_ERROR,
    Call,
    Cut,
    Endless,
    Fault,
    Hangup,
    Malformed,
    ModelServer,
    Protocol,
    Say,
    Silence,
    Turn,
    overflow,
)

from skep.models.exchange import Request
from skep.models.failures import FailureKind, ModelFailure
from skep.models.models import Models
from skep.models.spec import ModelSpec

KEY = "sk-this-key-must-stay-here"
PROTOCOLS: Sequence[Protocol] = ("openai", "anthropic", "google")
TOOL = ToolDefinition(
    name="run_command",
    parameters_json_schema={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)
HELLO = (ModelRequest.user_text_prompt("Hello"),)

#: Those in which a model writes the arguments of a call itself, as it likes.
WRITTEN = PROTOCOLS[:2]
each = pytest.mark.parametrize("protocol", PROTOCOLS)


class Verdict(BaseModel):
    """How a prompt is to be answered."""

    kind: str
    sure: float


def spec(server: ModelServer, protocol: Protocol, *, supports_json: bool = True) -> ModelSpec:
    address = server.base_url(protocol)
    return ModelSpec(protocol, MODEL_IDS[protocol], base_url=address, key=KEY, supports_json=supports_json)


async def failure_of(server: ModelServer, protocol: Protocol, *, timeout_s: float = 20) -> ModelFailure:
    async with Models([spec(server, protocol)], timeout_s=timeout_s) as models:
        with pytest.raises(ModelFailure) as caught:
            await models.ask(Request("work", HELLO, tools=[TOOL]))
    return caught.value


@each
async def test_text_calls_tokens_and_price_come_over_a_stream(protocol: Protocol) -> None:
    turn = Say("I look.", (Call("run_command", {"command": "ls"}),), tokens=(1000, 100), piece=3)
    with ModelServer([turn]) as server:
        async with Models([spec(server, protocol)]) as models:
            answer = await models.ask(Request("work", HELLO, tools=[TOOL], max_tokens=50))
    (asked,) = server.received
    assert asked.streaming
    assert asked.tools == ["run_command"]
    assert asked.key == KEY
    assert asked.max_tokens == 50
    assert answer.response.text == "I look."
    assert [(call.tool_name, call.args_as_dict()) for call in answer.response.tool_calls] == [
        ("run_command", {"command": "ls"})
    ]
    assert (answer.spend.input_tokens, answer.spend.output_tokens) == (1000, 100)
    assert answer.spend.usd is not None
    assert Decimal(0) < answer.spend.usd < Decimal("0.01")
    assert not answer.scripted
    assert answer.tried == (f"{protocol}/{MODEL_IDS[protocol]}",)


FAULTS: list[tuple[FailureKind, Turn]] = [
    ("rate_limit", RATE_LIMIT),
    ("overloaded", OVERLOADED),
    ("overloaded", Fault(503, "no room")),
    ("server_error", SERVER_ERROR),
    ("server_error", Fault(502, body="<html>Bad gateway</html>")),
    ("refused", Fault(401, "this key is not known")),
    ("refused", Fault(404, "there is no such model")),
    ("refused", Fault(402, "nothing is left to pay with")),
    ("malformed", Malformed()),
    ("malformed", Malformed("[1]")),
    ("malformed", Malformed("")),
    ("malformed", Fault(200, body="<html>Welcome</html>")),
    ("malformed", Say("")),
    ("cut", Cut()),
    ("cut", Cut(politely=True)),
    ("cut", Hangup()),
    ("too_long", LONG),
    ("too_long", Say(calls=(Call("run_command", "x" * 1_100_000),), piece=50_000)),
]


#: Google's library is a third one under the same translation: of each kind one fault is enough there.
MET = [
    pytest.param(protocol, kind, turn, id=f"{protocol}-{kind}-{type(turn).__name__}")
    for protocol in PROTOCOLS
    for place, (kind, turn) in enumerate(FAULTS)
    if protocol in WRITTEN or kind not in [earlier for earlier, _ in FAULTS[:place]]
]


@pytest.mark.parametrize(("protocol", "kind", "turn"), MET)
async def test_each_fault_has_its_name_and_is_met_once(protocol: Protocol, kind: FailureKind, turn: Turn) -> None:
    with ModelServer([turn, Say("A second request was made.")]) as server:
        failure = await failure_of(server, protocol)
    assert failure.kind == kind, failure
    assert (failure.provider, len(server.received)) == (protocol, 1)
    assert failure.hint
    if isinstance(turn, Fault) and turn.status >= 400:
        assert failure.status_code == turn.status


@each
async def test_a_conversation_that_is_too_long_is_told_from_other_refusals(protocol: Protocol) -> None:
    with ModelServer([overflow(protocol)]) as server:
        assert (await failure_of(server, protocol)).kind == "context_overflow"


@each
@pytest.mark.parametrize("turn", [Silence(), Endless(""), Endless("x", pause_s=0.05)], ids=["silent", "alive", "slow"])
async def test_a_server_without_an_end_is_left_at_the_timeout(protocol: Protocol, turn: Turn) -> None:
    with ModelServer([turn]) as server:
        assert (await failure_of(server, protocol, timeout_s=0.3)).kind == "timeout"


@each
async def test_an_endless_answer_ends_at_its_bound(protocol: Protocol) -> None:
    with ModelServer([Endless("on and on " * 5000, pause_s=0)]) as server:
        assert (await failure_of(server, protocol)).kind == "too_long"


@each
async def test_an_answer_that_never_makes_a_line_ends_at_its_bound(protocol: Protocol) -> None:
    with ModelServer([Fault(200, body="data: " + "x" * (9 << 20))]) as server:
        assert (await failure_of(server, protocol)).kind == "too_long"


@each
async def test_a_provider_says_how_long_to_wait(protocol: Protocol) -> None:
    with ModelServer([Fault(429, retry_after="7"), Fault(429, retry_after="99999999")]) as server:
        assert (await failure_of(server, protocol)).retry_after_s == 7
        assert (await failure_of(server, protocol)).retry_after_s == 3600


@each
async def test_an_error_that_repeats_the_key_does_not_pass_it_on(protocol: Protocol) -> None:
    with ModelServer([Fault(401, f"bad key {KEY}\x1b[31m " + "!" * 5000)]) as server:
        failure = await failure_of(server, protocol)
    assert KEY not in failure.message
    assert "bad key [secret]" in failure.message
    assert "\x1b" not in failure.message
    assert len(failure.message) < 1000


@each
async def test_an_answer_that_repeats_the_key_does_not_pass_it_on(protocol: Protocol) -> None:
    turn = Say(f"Your key is {KEY}.", (Call("run_command", {"command": f"echo {KEY}"}),))
    with ModelServer([turn]) as server:
        async with Models([spec(server, protocol)]) as models:
            answer = await models.ask(Request("work", HELLO, tools=[TOOL]))
    assert answer.response.text == "Your key is [secret]."
    assert [call.args_as_dict() for call in answer.response.tool_calls] == [{"command": "echo [secret]"}]


async def test_the_next_model_answers_for_an_overloaded_one_and_both_are_named() -> None:
    with ModelServer([OVERLOADED]) as busy, ModelServer([Say("Here I am.")]) as free:
        async with Models([spec(busy, "openai"), spec(free, "anthropic")]) as models:
            answer = await models.ask(Request("work", HELLO))
    assert answer.response.text == "Here I am."
    assert answer.tried == ("openai/gpt-4o", "anthropic/claude-haiku-5-5")
    assert [failure.kind for failure in answer.failures] == ["overloaded"]


async def test_a_server_that_is_not_there_counts_as_overloaded() -> None:
    with ModelServer() as gone:
        address = gone.openai
    with ModelServer([Say("Here I am.")]) as free:
        nowhere = ModelSpec("openai", "gpt-4o", base_url=address, key=KEY)
        async with Models([nowhere, spec(free, "anthropic")]) as models:
            answer = await models.ask(Request("work", HELLO))
    assert answer.failures[0].kind == "overloaded"


async def test_other_failures_are_left_to_the_caller() -> None:
    with ModelServer([SERVER_ERROR]) as broken, ModelServer([Say("Nobody asked me.")]) as free:
        async with Models([spec(broken, "openai"), spec(free, "anthropic")]) as models:
            with pytest.raises(ModelFailure) as caught:
                await models.ask(Request("work", HELLO))
    assert caught.value.tried == ("openai/gpt-4o",)
    assert free.received == []


@each
@pytest.mark.parametrize("supports_json", [True, False], ids=["held to a schema", "told the schema"])
async def test_a_value_of_a_schema_comes_back_as_one(protocol: Protocol, supports_json: bool) -> None:
    value = {"kind": "task", "sure": 0.75}
    prose = Say('Gladly:\n```json\n{"kind": "task", "sure": 0.75}\n```\nAnything else?')
    with ModelServer([Say(value=value) if supports_json else prose]) as server:
        async with Models([spec(server, protocol, supports_json=supports_json)]) as models:
            answer = await models.ask(Request("classify", HELLO, schema=Verdict))
    assert answer.value == Verdict(kind="task", sure=0.75)
    assert bool(server.received[0].tools or "output_config" in server.received[0].body) is supports_json
    assert ("sure" in server.received[0].text) is not supports_json


@each
@pytest.mark.parametrize(
    "turn",
    [Say(value={"kind": "task"}), Say("No."), Say(calls=(Call("answer", '{"kind": "ta'),))],
    ids=["lacks a field", "prose", "half a call"],
)
async def test_what_is_no_value_of_the_schema_is_paid_for_and_named(protocol: Protocol, turn: Say) -> None:
    with ModelServer([turn]) as server:
        async with Models([spec(server, protocol)]) as models:
            with pytest.raises(ModelFailure) as caught:
                await models.ask(Request("classify", HELLO, schema=Verdict))
    assert caught.value.kind == "invalid_output"
    assert caught.value.spend is not None
    assert caught.value.spend.usd


@pytest.mark.parametrize("protocol", WRITTEN)
async def test_arguments_that_are_no_json_reach_the_caller_as_they_are(protocol: Protocol) -> None:
    with ModelServer([Say(calls=(Call("run_command", '{"command": "ls'),))]) as server:
        async with Models([spec(server, protocol)]) as models:
            answer = await models.ask(Request("work", HELLO, tools=[TOOL]))
    assert answer.response.tool_calls[0].args == '{"command": "ls'


@each
async def test_an_answer_that_a_filter_withheld_is_a_refusal(protocol: Protocol) -> None:
    stop = {"openai": "content_filter", "anthropic": "refusal", "google": "SAFETY"}[protocol]
    with ModelServer([Say("I cannot", stop=stop)]) as server:
        assert (await failure_of(server, protocol)).kind == "refused"


async def test_many_calls_at_once_share_one_pool() -> None:
    with ModelServer(lambda asked: Say(f"{asked.number}")) as server:
        async with Models([spec(server, "openai")]) as models:
            answers = await asyncio.gather(*(models.ask(Request("work", HELLO)) for _ in range(40)))
    assert len({answer.response.text for answer in answers}) == 40


async def test_a_call_that_is_cancelled_lets_go_at_once() -> None:
    with ModelServer([Silence()]) as server:
        async with Models([spec(server, "openai")]) as models:
            call = asyncio.create_task(models.ask(Request("work", HELLO)))
            async with asyncio.timeout(10):
                while not server.received:
                    await asyncio.sleep(0.005)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        ("openrouter", "openai/gpt-4o"),
        ("ollama", "qwen3"),
        ("deepseek", "deepseek-chat"),
        ("litellm", "one"),
        ("azure", "one"),
        ("bedrock", "one"),
        ("a-server-of-ours", "one"),
    ],
)
async def test_with_an_address_other_providers_are_asked_in_the_protocol_of_openai(provider: str, model: str) -> None:
    turn = Say("Here.", (Call("run_command", {"command": "ls"}),))
    with ModelServer([turn, Fault(429, f"slow down, {KEY}", retry_after="3")]) as server:
        async with Models([ModelSpec(provider, model, base_url=server.openai, key=KEY)]) as models:
            answer = await models.ask(Request("work", HELLO, tools=[TOOL]))
            with pytest.raises(ModelFailure) as caught:
                await models.ask(Request("work", HELLO))
    assert (answer.response.text, [call.tool_name for call in answer.response.tool_calls]) == ("Here.", ["run_command"])
    assert (answer.tried, server.received[0].key) == ((f"{provider}/{model}",), KEY)
    assert (caught.value.kind, caught.value.retry_after_s, caught.value.provider) == ("rate_limit", 3, provider)
    assert KEY not in str(caught.value)
