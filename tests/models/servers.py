"""A real HTTP server of models on loopback: OpenAI's chat completions and Anthropic's messages, scripted, with faults.

    with ModelServer([Fault(429, retry_after="1"), Say("Hello.")]) as server:
        server.openai      # base_url for provider "openai"
        server.anthropic   # base_url for provider "anthropic"
        server.received    # what was asked, in order

A script is a list of turns, used up one by one, or a function of what was asked (then it may also wait for something
of its own: each request has a thread). The function is the better script where a worker may die and ask again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self

Protocol = Literal["openai", "anthropic"]

#: A model of each that has a price, and that no SDK warns about.
MODEL_IDS: dict[Protocol, str] = {"openai": "gpt-4o", "anthropic": "claude-haiku-5-5"}


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
    if protocol == "openai":
        message = (
            "This model's maximum context length is 128000 tokens. However, your messages resulted in 210000 tokens."
        )
        return Fault(400, message, type="invalid_request_error", code="context_length_exceeded")
    return Fault(400, "prompt is too long: 210000 tokens > 200000 maximum", type="invalid_request_error")


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came over the wire; `number` counts from 0."""

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
    def key(self) -> str:
        return self.headers.get("x-api-key") or self.headers.get("authorization", "").removeprefix("Bearer ")

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(self.body.get("messages", []))

    @property
    def tools(self) -> list[str]:
        return [str((tool.get("function") or tool).get("name")) for tool in self.body.get("tools") or []]

    @property
    def system(self) -> str:
        """All instructions together."""
        said = [message for message in self.messages if message["role"] in {"system", "developer"}]
        return "\n".join([_flat(self.body.get("system")), *(_flat(message.get("content")) for message in said)])

    @property
    def last(self) -> str:
        """The text of the last message, be it a prompt or the result of a call."""
        return _flat(self.messages[-1].get("content")) if self.messages else ""

    @property
    def text(self) -> str:
        """Everything that was said so far, calls and results included."""
        return json.dumps([self.body.get("system"), self.messages], ensure_ascii=False)

    @property
    def results(self) -> int:
        """How many results of calls the conversation holds."""
        blocks = [block for message in self.messages for block in _blocks(message.get("content"))]
        kinds = [message["role"] for message in self.messages] + [block.get("type") for block in blocks]
        return kinds.count("tool") + kinds.count("tool_result")


Script = Sequence[Turn] | Callable[[Received], Turn]


def _blocks(content: object) -> list[dict[str, Any]]:
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _flat(content: object) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(block.get("text") or _flat(block.get("content"))) for block in _blocks(content))


class ModelServer:
    """The server; a list that is used up answers with status 400, which no client tries again."""

    def __init__(self, script: Script = ()) -> None:
        self.received: list[Received] = []
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._rest = list(script) if not callable(script) else []
        self._choose = script if callable(script) else self._take
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def openai(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @property
    def anthropic(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def base_url(self, protocol: Protocol) -> str:
        return self.openai if protocol == "openai" else self.anthropic

    def add(self, *turns: Turn) -> None:
        """Put turns at the end of the list."""
        with self._lock:
            self._rest.extend(turns)

    @property
    def left(self) -> int:
        """How many turns of the list are not used up."""
        return len(self._rest)

    def note(self, protocol: Protocol, headers: dict[str, str], body: dict[str, Any]) -> tuple[Received, Turn]:
        with self._lock:
            received = Received(protocol, len(self.received), headers, body)
            self.received.append(received)
        return received, self._choose(received)

    def _take(self, _: Received) -> Turn:
        with self._lock:
            return self._rest.pop(0) if self._rest else Fault(400, "the script of this server is used up")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    owner: ModelServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that go away are what many tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", "0"))) or b"{}")
        if self.path.endswith("/chat/completions"):
            protocol: Protocol = "openai"
        elif self.path.split("?")[0].endswith("/messages"):
            protocol = "anthropic"
        else:
            self._whole(404, {"error": {"message": f"there is no {self.path} here"}})
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        received, turn = self.server.owner.note(protocol, headers, body)
        self._answer(received, turn)

    def _answer(self, received: Received, turn: Turn) -> None:
        match turn:
            case Say():
                self._say(received, turn)
            case Fault():
                self._fail(received, turn)
            case Silence():
                self._wait()
            case Hangup():
                self.close_connection = True
            case Malformed(text):
                self._malformed(received, text)
            case Cut(text, politely):
                self._cut(received, text, politely)
            case Endless(piece, pause_s):
                self._run_on(received, piece, pause_s)

    def _say(self, received: Received, turn: Say) -> None:
        turn = _shaped(received, turn)
        form = OpenAi(received, turn) if received.protocol == "openai" else Anthropic(received, turn)
        if not received.streaming:
            self._whole(200, form.whole())
            return
        self._begin()
        for event in form.stream():
            self._chunk(event)
            if turn.pause_s and self.server.owner.over.wait(turn.pause_s):
                return
        self._chunk("")

    def _fail(self, received: Received, fault: Fault) -> None:
        headers = {"retry-after": fault.retry_after} if fault.retry_after is not None else {}
        error = {"message": fault.message, "type": fault.type or "api_error"}
        body: dict[str, Any] = {"error": {**error, "code": fault.code, "param": None}}
        if received.protocol == "anthropic":
            body = {"type": "error", "error": error}
        self._whole(fault.status, fault.body if fault.body is not None else body, headers)

    def _wait(self) -> None:
        self.close_connection = True
        self.server.owner.over.wait(600)

    def _malformed(self, received: Received, text: str) -> None:
        if not received.streaming:
            self._whole(200, text)
            return
        self._begin()
        event = "event: content_block_delta\n" if received.protocol == "anthropic" else ""
        self._chunk(f"{event}data: {text}\n\n")
        self._chunk("")

    def _cut(self, received: Received, text: str, politely: bool) -> None:
        self.close_connection = True
        turn = Say(text, piece=8)
        form = OpenAi(received, turn) if received.protocol == "openai" else Anthropic(received, turn)
        self._begin()
        for event in form.begun():
            self._chunk(event)
        if politely:
            self._chunk("")

    def _run_on(self, received: Received, piece: str, pause_s: float) -> None:
        self.close_connection = True
        turn = Say(piece, piece=len(piece) or 1)
        form = OpenAi(received, turn) if received.protocol == "openai" else Anthropic(received, turn)
        self._begin()
        events = form.begun()
        for event in events[:-1]:
            self._chunk(event)
        again = events[-1] if piece else ": still here\n\n"
        while not self.server.owner.over.wait(pause_s):
            self._chunk(again)

    def _whole(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        raw = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _chunk(self, text: str) -> None:
        raw = text.encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(raw), raw))
        self.wfile.flush()


def _shaped(received: Received, turn: Say) -> Say:
    """Give a value the form that the request wants: a call of the one tool it is held to, or text that is JSON."""
    if turn.value is None:
        return turn
    forced = received.body.get("tool_choice")
    named = (forced.get("function") or forced).get("name") if isinstance(forced, dict) else None
    wants_text = "response_format" in received.body or "output_config" in received.body
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
