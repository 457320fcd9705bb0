"""Which model answers what, what it cost, and how conversations are kept."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal

import pytest
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.usage import RequestUsage

from skep.errors import ConfigInvalid, ModelMissing
from skep.models.exchange import Request
from skep.models.failures import ModelFailure
from skep.models.messages import dump_messages, load_messages
from skep.models.models import Models
from skep.models.prices import spend_of
from skep.models.spec import ROLE_LEVELS, Level, ModelSpec

LIGHT, NORMAL, SUPER = (ModelSpec("openai", level, level) for level in ("light", "normal", "super"))
SPARE = ModelSpec("anthropic", "spare", "normal")


@pytest.mark.parametrize(
    ("level", "order"),
    [
        ("light", ["light", "normal", "super"]),
        ("normal", ["normal", "super", "light"]),
        ("super", ["super", "normal", "light"]),
    ],
)
def test_the_level_asked_for_is_best_then_stronger_then_weaker(level: Level, order: list[str]) -> None:
    chosen = Models([SUPER, LIGHT, NORMAL]).choose("work", level=level)
    assert [spec.id for spec in chosen] == order


def test_each_role_has_its_level_and_the_order_of_the_settings_decides_within_one() -> None:
    models = Models([LIGHT, NORMAL, SPARE, SUPER])
    assert {role: models.choose(role)[0].level for role in ROLE_LEVELS} == ROLE_LEVELS
    assert [spec.id for spec in models.choose("work")][:2] == ["normal", "spare"]


@pytest.mark.parametrize(
    ("avoid", "first"), [({"openai"}, "spare"), ({"openai/normal"}, "spare"), ({"openai", "anthropic"}, "normal")]
)
def test_what_is_to_be_avoided_answers_only_where_there_is_no_other(avoid: set[str], first: str) -> None:
    assert Models([NORMAL, SPARE]).choose("work", avoid=avoid)[0].id == first


async def test_without_a_model_the_error_says_what_to_add() -> None:
    with pytest.raises(ModelMissing) as caught:
        await Models([]).ask(Request("plan", [ModelRequest.user_text_prompt("Hello")]))
    assert "chat_models" in (caught.value.hint or "")


async def test_a_provider_whose_circuit_is_open_is_not_asked() -> None:
    hello = ModelSpec("rehearsal", "hello")
    request = Request("work", [ModelRequest.user_text_prompt("Hello")])
    answer = await Models([NORMAL, hello], is_open=lambda name: name == "openai").ask(request)
    assert answer.tried == ("rehearsal/hello",)
    with pytest.raises(ModelFailure) as caught:
        await Models([NORMAL], is_open=lambda _: True).ask(request)
    assert caught.value.kind == "circuit_open"


USAGE = RequestUsage(input_tokens=1_000_000, output_tokens=0)


@pytest.mark.parametrize(
    ("spec", "usage", "usd"),
    [
        (ModelSpec("openai", "gpt-4o"), USAGE, Decimal("2.5")),
        (ModelSpec("openai", "gpt-4o"), RequestUsage(), None),
        (ModelSpec("openai", "gpt-4o"), RequestUsage(input_tokens=1, unmeasured_requests=1), None),
        (ModelSpec("openai", "a-model-of-our-own"), USAGE, None),
        (ModelSpec("ollama", "llama"), USAGE, None),
        (ModelSpec("rehearsal", "hello"), USAGE, Decimal(0)),
    ],
    ids=["listed", "no tokens told", "not all tokens told", "unknown model", "unknown provider", "scripted"],
)
def test_a_call_has_its_listed_price_or_none_at_all(spec: ModelSpec, usage: RequestUsage, usd: Decimal | None) -> None:
    assert spend_of(spec, usage).usd == usd


@pytest.mark.parametrize(
    ("provider", "needs"),
    [
        ("acme", "OpenAI's protocol"),
        ("bedrock", "OpenAI's protocol"),
        ("openai-codex", "OpenAI's protocol"),
        ("voyageai", "OpenAI's protocol"),
        ("ollama", "base_url"),
        ("litellm", "base_url"),
    ],
)
async def test_a_provider_that_a_key_is_not_enough_for_is_told_with_what_to_do(provider: str, needs: str) -> None:
    models = Models([ModelSpec(provider, "one", key="k")])
    with pytest.raises(ConfigInvalid, match=provider) as caught:
        await models.ask(Request("work", [ModelRequest.user_text_prompt("Hello")]))
    assert needs in (caught.value.hint or "")


def test_a_conversation_survives_being_written_down() -> None:
    said: list[ModelMessage] = [
        ModelRequest(parts=[UserPromptPart("Lösche nichts \x07\u2028")], instructions="Be brief."),
        ModelResponse(parts=[TextPart("Gut."), ToolCallPart("run_command", '{"command": "ls', "call_1")]),
        ModelRequest(parts=[ToolReturnPart("run_command", {"exit_code": 0}, "call_1")]),
    ]
    assert load_messages(dump_messages(said)) == said
    with pytest.raises(ValueError, match="JSON"):
        load_messages("{")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_importing_the_models_brings_no_provider_along() -> None:
    ran = run(
        "import skep.models.models, sys; print([n for n in ('pydantic_ai', 'httpx2', 'yaml') if n in sys.modules])"
    )
    assert ran.stdout.strip() == "[]", ran.stderr


MISSING = """
import asyncio, sys
absent = ["anthropic", "openai", "google.genai", "groq", "mistralai", "cohere", "huggingface_hub", "xai_sdk"]
sys.modules.update(dict.fromkeys(absent))
from pydantic_ai.messages import ModelRequest
from skep.errors import ModelUnavailable
from skep.models.exchange import Request
from skep.models.models import Models
from skep.models.spec import ModelSpec

request = Request("work", [ModelRequest.user_text_prompt("Hello")])
for provider in ("anthropic", "openai", "deepseek", "google", "groq", "mistral", "cohere", "huggingface", "xai"):
    try:
        asyncio.run(Models([ModelSpec(provider, "one", key="k")]).ask(request))
    except ModelUnavailable as error:
        print(error.hint)
"""


def test_a_missing_package_is_told_with_the_command_that_installs_it() -> None:
    ran = run(MISSING)
    assert ran.stdout.splitlines() == [
        "pip install 'skep[anthropic]'",
        "pip install 'skep[openai]'",
        "pip install 'skep[openai]'",
        "pip install 'skep[google]'",
        *(f"pip install 'pydantic-ai-slim[{name}]'" for name in ("groq", "mistral", "cohere", "huggingface", "xai")),
    ], ran.stderr
