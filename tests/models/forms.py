"""The answers of a server of models, in the form of each protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.models.turns import Call, Fault, Received, Say


def form(received: Received, turn: Say) -> OpenAi | Anthropic | Google:
    """Give an answer the form of the protocol in which it was asked for."""
    match received.protocol:
        case "openai":
            return OpenAi(received, turn)
        case "anthropic":
            return Anthropic(received, turn)
        case "google":
            return Google(received, turn)


def refusal(received: Received, fault: Fault) -> dict[str, Any]:
    """Return the body of an error."""
    error: dict[str, Any] = {"message": fault.message, "type": fault.type or "api_error"}
    match received.protocol:
        case "openai":
            return {"error": {**error, "code": fault.code, "param": None}}
        case "anthropic":
            return {"type": "error", "error": error}
        case "google":
            status = fault.type or GOOGLE_STATUSES.get(fault.status, "UNKNOWN")
            return {"error": {"code": fault.status, "message": fault.message, "status": status}}


#: What says that more is to come, and nothing else.
ALIVE = ": still here\n\n"
GOOGLE_STATUSES = {
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}


def shaped(received: Received, turn: Say) -> Say:
    """Give a value the form that the request wants: a call of the one tool it is held to, or text that is JSON."""
    if turn.value is None:
        return turn
    forced = received.body.get("tool_choice")
    named = (forced.get("function") or forced).get("name") if isinstance(forced, dict) else None
    config = received.body.get("generationConfig") or {}
    wants_text = {"response_format", "output_config"} & received.body.keys() or "responseMimeType" in config
    name = named or (received.tools[0] if len(received.tools) == 1 and not wants_text else None)
    if name is not None:
        return Say(turn.text, (*turn.calls, Call(name, turn.value)), tokens=turn.tokens, piece=turn.piece)
    return Say(json.dumps(turn.value), turn.calls, tokens=turn.tokens, piece=turn.piece)


def _pieces(text: str, size: int) -> Iterator[str]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


def _arguments(call: Call) -> str:
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)


@dataclass(frozen=True, slots=True)
class OpenAi:
    """An answer in the form of chat completions."""

    received: Received
    turn: Say
    alive: ClassVar[str] = ALIVE

    def _id(self, number: int) -> str:
        return self.turn.calls[number].id or f"call_{self.received.number}_{number}"

    @property
    def _usage(self) -> dict[str, int]:
        read, written = self.turn.tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    @property
    def _end(self) -> str:
        return self.turn.stop or ("tool_calls" if self.turn.calls else "stop")

    def _base(self, kind: str) -> dict[str, Any]:
        head = {"id": f"chatcmpl-{self.received.number}", "object": kind, "created": 1_700_000_000}
        return {**head, "model": self.received.model}

    def whole(self) -> dict[str, Any]:
        calls = [
            {"id": self._id(number), "type": "function", "function": {"name": call.tool, "arguments": _arguments(call)}}
            for number, call in enumerate(self.turn.calls)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.turn.text or None}
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "finish_reason": self._end}
        return {**self._base("chat.completion"), "choices": [choice], "usage": self._usage}

    def _event(self, delta: dict[str, Any], end: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": end}
        return f"data: {json.dumps({**self._base('chat.completion.chunk'), 'choices': [choice]})}\n\n"

    def begun(self) -> list[str]:
        texts = [self._event({"content": piece}) for piece in _pieces(self.turn.text, self.turn.piece)]
        return [self._event({"role": "assistant", "content": ""}), *texts]

    def stream(self) -> Iterator[str]:
        yield from self.begun()
        for number, call in enumerate(self.turn.calls):
            function = {"name": call.tool, "arguments": ""}
            head = {"index": number, "id": self._id(number), "type": "function", "function": function}
            yield self._event({"tool_calls": [head]})
            for piece in _pieces(_arguments(call), self.turn.piece):
                yield self._event({"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
        yield self._event({}, self._end)
        tail = {**self._base("chat.completion.chunk"), "choices": [], "usage": self._usage}
        yield f"data: {json.dumps(tail)}\n\ndata: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Anthropic:
    """An answer in the form of messages."""

    received: Received
    turn: Say
    alive: ClassVar[str] = ALIVE

    def _id(self, number: int) -> str:
        return self.turn.calls[number].id or f"toolu_{self.received.number}_{number}"

    @property
    def _end(self) -> str:
        return self.turn.stop or ("tool_use" if self.turn.calls else "end_turn")

    def _message(self, content: list[dict[str, Any]], end: str | None, written: int) -> dict[str, Any]:
        head = {"id": f"msg_{self.received.number}", "type": "message", "role": "assistant"}
        usage = {"input_tokens": self.turn.tokens[0], "output_tokens": written}
        tail = {"stop_reason": end, "stop_sequence": None, "usage": usage}
        return {**head, "model": self.received.model, "content": content, **tail}

    def whole(self) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "text", "text": self.turn.text}] if self.turn.text else []
        for number, call in enumerate(self.turn.calls):
            content.append({"type": "tool_use", "id": self._id(number), "name": call.tool, "input": call.arguments})
        return self._message(content, self._end, self.turn.tokens[1])

    def _event(self, kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

    def begun(self) -> list[str]:
        block = {"type": "text", "text": ""}
        events = [self._event("message_start", message=self._message([], None, 1))]
        if self.turn.text:
            events.append(self._event("content_block_start", index=0, content_block=block))
        for piece in _pieces(self.turn.text, self.turn.piece):
            events.append(self._event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece}))
        return events

    def stream(self) -> Iterator[str]:
        yield from self.begun()
        if self.turn.text:
            yield self._event("content_block_stop", index=0)
        first = 1 if self.turn.text else 0
        for number, call in enumerate(self.turn.calls):
            block = {"type": "tool_use", "id": self._id(number), "name": call.tool, "input": {}}
            yield self._event("content_block_start", index=first + number, content_block=block)
            for piece in _pieces(_arguments(call), self.turn.piece):
                delta = {"type": "input_json_delta", "partial_json": piece}
                yield self._event("content_block_delta", index=first + number, delta=delta)
            yield self._event("content_block_stop", index=first + number)
        end: dict[str, Any] = {"stop_reason": self._end, "stop_sequence": None}
        yield self._event("message_delta", delta=end, usage={"output_tokens": self.turn.tokens[1]})
        yield self._event("message_stop")


@dataclass(frozen=True, slots=True)
class Google:
    """An answer in the form of generateContent."""

    received: Received
    turn: Say

    def _chunk(self, parts: list[dict[str, Any]], end: str | None = None) -> dict[str, Any]:
        read, written = self.turn.tokens
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
        usage = {"promptTokenCount": read, "totalTokenCount": read}
        if end is not None:
            candidate["finishReason"] = end
            usage = {"promptTokenCount": read, "candidatesTokenCount": written, "totalTokenCount": read + written}
        head = {"modelVersion": self.received.model, "responseId": f"response-{self.received.number}"}
        return {"candidates": [candidate], "usageMetadata": usage, **head}

    @property
    def alive(self) -> str:
        return _data({"usageMetadata": {"promptTokenCount": self.turn.tokens[0]}})

    @property
    def _calls(self) -> list[dict[str, Any]]:
        """The calls; here arguments are always an object."""
        given = [(call.tool, call.arguments) for call in self.turn.calls]
        return [
            {"functionCall": {"name": tool, "args": {"text": args} if isinstance(args, str) else args}}
            for tool, args in given
        ]

    @property
    def _end(self) -> str:
        return self.turn.stop or "STOP"

    def whole(self) -> dict[str, Any]:
        return self._chunk([*([{"text": self.turn.text}] if self.turn.text else []), *self._calls], self._end)

    def begun(self) -> list[str]:
        texts = [[{"text": piece}] for piece in _pieces(self.turn.text, self.turn.piece)]
        return [_data(self._chunk(parts)) for parts in texts or [[]]]

    def stream(self) -> Iterator[str]:
        if self.turn.text:
            yield from self.begun()
        yield _data(self._chunk(self._calls, self._end))


def _data(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
