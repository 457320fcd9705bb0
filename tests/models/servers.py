"""A real HTTP server of models on loopback: the protocols of OpenAI, Anthropic and Google, with faults.

    with ModelServer([Fault(429, retry_after="1"), Say("Hello.")]) as server:
        server.openai      # base_url for provider "openai"
        server.anthropic   # base_url for provider "anthropic", and for "google"
        server.received    # what was asked, in order

A script is a list of turns, used up one by one, or a function of what was asked (then it may also wait for something
of its own: each request has a thread). The function is the better script where a worker may die and ask again.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.models.forms import form, refusal, shaped
from tests.models.turns import (
    BAD_ARGUMENTS,
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
    Protocol,
    Received,
    Say,
    Script,
    Silence,
    Turn,
    overflow,
)

__all__ = [
    "BAD_ARGUMENTS",
    "LONG",
    "MODEL_IDS",
    "OVERLOADED",
    "RATE_LIMIT",
    "SERVER_ERROR",
    "Call",
    "Cut",
    "Endless",
    "Fault",
    "Hangup",
    "Malformed",
    "ModelServer",
    "Protocol",
    "Received",
    "Say",
    "Script",
    "Silence",
    "Turn",
    "overflow",
]

#: Google's way to name a model and an act.
_GOOGLE = re.compile(r"/models/([^/:]+):(generateContent|streamGenerateContent)$")


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
        path = self.path.split("?")[0]
        if path.endswith("/chat/completions"):
            protocol: Protocol = "openai"
        elif path.endswith("/messages"):
            protocol = "anthropic"
        elif google := _GOOGLE.search(path):
            protocol = "google"
            body |= {"model": google[1], "stream": google[2].startswith("stream")}
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
        turn = shaped(received, turn)
        answer = form(received, turn)
        if not received.streaming:
            self._whole(200, answer.whole())
            return
        self._begin()
        for event in answer.stream():
            self._chunk(event)
            if turn.pause_s and self.server.owner.over.wait(turn.pause_s):
                return
        self._chunk("")

    def _fail(self, received: Received, fault: Fault) -> None:
        headers = {"retry-after": fault.retry_after} if fault.retry_after is not None else {}
        self._whole(fault.status, refusal(received, fault) if fault.body is None else fault.body, headers)

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
        self._begin()
        for event in form(received, turn).begun():
            self._chunk(event)
        if politely:
            self._chunk("")

    def _run_on(self, received: Received, piece: str, pause_s: float) -> None:
        self.close_connection = True
        turn = Say(piece, piece=len(piece) or 1)
        self._begin()
        answer = form(received, turn)
        events = answer.begun()
        for event in events[:-1]:
            self._chunk(event)
        again = events[-1] if piece else answer.alive
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
