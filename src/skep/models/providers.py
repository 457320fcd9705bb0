"""The models behind their specifications, whoever serves them."""

from __future__ import annotations

import asyncio
import inspect
import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from skep.errors import ConfigInvalid, ModelUnavailable
from skep.models.exchange import Request
from skep.models.spec import ModelSpec

if TYPE_CHECKING:
    from httpx2 import AsyncClient
    from pydantic_ai.models import Model
    from pydantic_ai.providers import Provider

    from skep.models.script import Script

# Written out so that no variable of an SDK's own can send a conversation, and a key, somewhere else.
_OPENAI_URL = "https://api.openai.com/v1"
_ANTHROPIC_URL = "https://api.anthropic.com"
_GOOGLE_URL = "https://generativelanguage.googleapis.com"
_OWN_EXTRAS = ("anthropic", "google", "openai")
_EXTRA = re.compile(r"pydantic-ai-slim\[([a-z-]+)\]")
#: Those whose server is one's own, wherever it is.
_ELSEWHERE = frozenset(("azure", "azure-responses", "litellm", "ollama", "vllm"))
#: Names of pydantic-ai's that take something else than a key, or answer no prompts. What they find by themselves, such
#: as somebody's sign-in to another program, is not for Skep to use.
_UNFIT = frozenset(
    (
        "bedrock",
        "bedrock-mantle",
        "elevenlabs",
        "google-cloud",
        "openai-chatgpt",
        "openai-codex",
        "openai-decisions",
        "sentence-transformers",
        "snowflake",
        "system-one",
        "typesafe",
        "voyageai",
    )
)
#: Servers on this machine take any key, but the SDKs want to send one.
_NO_KEY = "none"


class Providers:
    """The models that were asked so far, over one pool of connections; scripts are read once."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._made: dict[ModelSpec, Model] = {}
        self._scripts: dict[str, Script] = {}
        self._turn = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._client: AsyncClient | None = None

    async def model(self, spec: ModelSpec, request: Request) -> Model:
        """Return the model that will take this request."""
        if spec.is_scripted:
            return self._rehearsal(spec, request)
        async with self._turn:
            if spec not in self._made:
                # In a thread: importing the SDK of a provider takes seconds, in which nothing else would move.
                made = await asyncio.to_thread(make, spec, await self._pool())
                self._made[spec] = await self._stack.enter_async_context(made)
            return self._made[spec]

    async def close(self) -> None:
        self._made.clear()
        self._client = None
        await self._stack.aclose()

    def _rehearsal(self, spec: ModelSpec, request: Request) -> Model:
        from skep.models.rehearsal import RehearsalModel
        from skep.models.script import load_script

        if spec.id not in self._scripts:
            self._scripts[spec.id] = load_script(spec.id)
        return RehearsalModel(self._scripts[spec.id], role=request.role, tries=request.tries)

    async def _pool(self) -> AsyncClient:
        from skep.models.transport import open_client

        if self._client is None:
            self._client = await self._stack.enter_async_context(open_client(self._timeout_s))
        return self._client


def make(spec: ModelSpec, client: AsyncClient) -> Model:
    """Make the model; its provider's package is imported here, and a missing one is named."""
    try:
        return _make(spec, client)
    except ImportError as error:
        install = _install(spec.provider, error)
        raise ModelUnavailable(f"the package for {spec.provider} is not installed: {install}", hint=install) from error


def _make(spec: ModelSpec, client: AsyncClient) -> Model:
    match spec.provider:
        case "openai":
            return _openai(spec, client)
        case "anthropic":
            return _anthropic(spec, client)
        case "google":
            return _google(spec, client)
        case _:
            return _named(spec, client)


def _openai(spec: ModelSpec, client: AsyncClient) -> Model:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    address, key = spec.base_url or _OPENAI_URL, spec.key or _NO_KEY
    return OpenAIChatModel(spec.id, provider=OpenAIProvider(address, key, http_client=client))


def _anthropic(spec: ModelSpec, client: AsyncClient) -> Model:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    address, key = spec.base_url or _ANTHROPIC_URL, spec.key or _NO_KEY
    return AnthropicModel(spec.id, provider=AnthropicProvider(base_url=address, api_key=key, http_client=client))


def _google(spec: ModelSpec, client: AsyncClient) -> Model:
    from pydantic_ai.models.google import GoogleModel
    from pydantic_ai.providers.google import GoogleProvider

    address, key = spec.base_url or _GOOGLE_URL, spec.key or _NO_KEY
    return GoogleModel(spec.id, provider=GoogleProvider(base_url=address, api_key=key, http_client=client))


def _named(spec: ModelSpec, client: AsyncClient) -> Model:
    """Let pydantic-ai find the provider by its name; any other with an address speaks OpenAI's protocol."""
    from pydantic_ai.exceptions import UserError
    from pydantic_ai.models import infer_model

    _require_address(spec)
    provider = None if spec.provider in _UNFIT else _provider_class(spec.provider)
    takes = inspect.signature(provider.__init__).parameters if provider else {}
    if provider is None or (spec.base_url and "base_url" not in takes):
        return _openai(spec, client)
    given: dict[str, Any] = {"api_key": spec.key or _NO_KEY, "base_url": spec.base_url}
    if "openai_client" in takes:  # those that share OpenAI's SDK share our client; others bring one of their own
        given["http_client"] = client
    try:
        made = provider(**{name: value for name, value in given.items() if name in takes and value is not None})
        return infer_model(f"{spec.provider}:{spec.id}", provider_factory=lambda _: made)
    except UserError as error:
        hint = f"look at the settings of {spec.name} in chat_models"
        raise ConfigInvalid(f"{spec.name} cannot be used: {error}", hint=hint) from error


def _require_address(spec: ModelSpec) -> None:
    if spec.base_url:
        return
    if spec.provider in _ELSEWHERE:
        hint = "add base_url to it in chat_models, such as http://127.0.0.1:11434/v1"
        raise ConfigInvalid(f"{spec.name} needs base_url: where its server is", hint=hint)
    if spec.provider in _UNFIT or _provider_class(spec.provider) is None:
        hint = "give base_url if it speaks OpenAI's protocol, or see docs/guides/models.md for the names"
        raise ConfigInvalid(f"there is no model provider {spec.provider} that a key alone is enough for", hint=hint)


def _provider_class(name: str) -> type[Provider[Any]] | None:
    from pydantic_ai.providers import infer_provider_class

    try:
        return infer_provider_class(name)
    except ValueError:
        return None


def _install(provider: str, error: ImportError) -> str:
    """Spell the command that installs what is missing: an extra of pydantic-ai, which its error names."""
    named = _EXTRA.search(str(error))
    extra = named[1] if named else provider
    package = "skep" if extra in _OWN_EXTRAS else "pydantic-ai-slim"
    return f"pip install '{package}[{extra}]'"
