"""What a server of models is asked for, and what it can be told to answer."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Protocol = Literal["openai", "anthropic", "google"]

#: A model of each that has a price, and that no SDK warns about.
MODEL_IDS: dict[Protocol, str] = {
    "openai": "gpt-4o",
    "anthropic": "claude-haiku-5-5",
    "google": "gemini-2.5-flash",
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; arguments that are a string are sent as they are, even when they are no JSON."""

    tool: str
    arguments: dict[str, Any] | str = field(default_factory=dict)
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Say:
    """A proper answer: text, calls, or a value in whichever form the request wants structured output."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    value: dict[str, Any] | None = None
    tokens: tuple[int, int] = (100, 20)
    piece: int = 40
    pause_s: float = 0.0
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer with a bad status, and the body that the provider would send with it."""

    status: int
    message: str = "injected"
    retry_after: str | None = None
    type: str | None = None
    code: str | None = None
    body: str | None = None


@dataclass(frozen=True, slots=True)
class Silence:
    """No answer at all: the connection stays open until the client, or the test, has had enough."""


@dataclass(frozen=True, slots=True)
class Hangup:
    """The connection is closed before a single byte of an answer."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Status 200, and then bytes that are no JSON."""

    text: str = '{"choices": [{"delta": {"content": "half'


@dataclass(frozen=True, slots=True)
class Cut:
    """An answer that breaks off in the middle; politely: the stream ends in order, but nobody says that it is over."""

    text: str = "This sentence is never going to be"
    politely: bool = False


@dataclass(frozen=True, slots=True)
class Endless:
    """A stream without an end. With an empty piece it only says that it is alive."""

    piece: str = "and so on "
    pause_s: float = 0.001


Turn = Say | Fault | Silence | Hangup | Malformed | Cut | Endless

RATE_LIMIT = Fault(429, "Rate limit reached", retry_after="0")
SERVER_ERROR = Fault(500, "Internal server error")
OVERLOADED = Fault(529, "Overloaded", type="overloaded_error")
LONG = Say("x" * 1_100_000, piece=50_000)
BAD_ARGUMENTS = Say(calls=(Call("run_command", '{"command": "ls'),))


def overflow(protocol: Protocol) -> Fault:
    """Return the error with which a provider refuses a conversation that is too long for its model."""
    if protocol == "google":
        told = "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."
        return Fault(400, told, type="INVALID_ARGUMENT")
    if protocol == "openai":
        message = (
            "This model's maximum context length is 128000 tokens. However, your messages resulted in 210000 tokens."
        )
        return Fault(400, message, type="invalid_request_error", code="context_length_exceeded")
    return Fault(400, "prompt is too long: 210000 tokens > 200000 maximum", type="invalid_request_error")


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came over the wire; `number` counts from 0. Google has the model in its path: it is put in."""

    protocol: Protocol
    number: int
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def model(self) -> str:
        return str(self.body.get("model", ""))

    @property
    def streaming(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def max_tokens(self) -> int | None:
        config = self.body.get("generationConfig") or {}
        limits = (self.body.get("max_tokens"), self.body.get("max_completion_tokens"), config.get("maxOutputTokens"))
        return next((limit for limit in limits if limit is not None), None)

    @property
    def key(self) -> str:
        given = self.headers.get("x-api-key") or self.headers.get("x-goog-api-key")
        return given or self.headers.get("authorization", "").removeprefix("Bearer ")

    @property
    def messages(self) -> list[dict[str, Any]]:
        if self.protocol == "google":
            return [{"role": one.get("role"), "content": one.get("parts")} for one in self.body.get("contents", [])]
        return list(self.body.get("messages", []))

    @property
    def tools(self) -> list[str]:
        tools = self.body.get("tools") or []
        if self.protocol == "google":
            return [str(one["name"]) for tool in tools for one in tool.get("functionDeclarations", [])]
        return [str((tool.get("function") or tool).get("name")) for tool in tools]

    @property
    def system(self) -> str:
        """All instructions together."""
        said = [message for message in self.messages if message["role"] in {"system", "developer"}]
        apart = _flat(self.body.get("system") or (self.body.get("systemInstruction") or {}).get("parts"))
        return "\n".join([apart, *(_flat(message.get("content")) for message in said)])

    @property
    def last(self) -> str:
        """The text of the last message, be it a prompt or the result of a call."""
        return _flat(self.messages[-1].get("content")) if self.messages else ""

    @property
    def text(self) -> str:
        """Everything that was said so far, calls and results included."""
        return json.dumps([self.system, self.messages], ensure_ascii=False)

    @property
    def results(self) -> int:
        """How many results of calls the conversation holds."""
        blocks = [block for message in self.messages for block in _blocks(message.get("content"))]
        kinds = [message["role"] for message in self.messages] + [block.get("type") for block in blocks]
        google = sum("functionResponse" in block for block in blocks)
        return kinds.count("tool") + kinds.count("tool_result") + google

    @property
    def images(self) -> list[bytes]:
        """The pictures that came along, wherever the protocol has them."""
        return list(_images(self.messages))


Script = Sequence[Turn] | Callable[[Received], Turn]


def _blocks(content: object) -> list[dict[str, Any]]:
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _flat(content: object) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(block.get("text") or _flat(block.get("content"))) for block in _blocks(content))


def _images(content: object) -> Iterator[bytes]:
    match content:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            yield base64.b64decode(url.partition(",")[2])
        case {"type": "image", "source": {"data": str(data)}} | {"inlineData": {"data": str(data)}}:
            yield base64.b64decode(data + "==", altchars=b"-_" if "-" in data or "_" in data else None)
        case dict():
            for inner in content.values():
                yield from _images(inner)
        case list():
            for inner in content:
                yield from _images(inner)
