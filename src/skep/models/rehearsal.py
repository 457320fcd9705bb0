"""A model that plays a script: for demos, tests and work without a network. It always says that it is scripted.

Which turn is taken depends on the conversation alone, so a task that is carried on by another process gets the same
answers. A conversation remembers which turns it took: each answer carries the number of its turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

from pydantic_ai import exceptions as raised
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    RetryFeedbackPart,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import CompletedStreamedResponse, Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import RunContext
from pydantic_ai.usage import RequestUsage

from skep.models.script import Fault, Script, ScriptedTurn, When
from skep.models.spec import REHEARSAL, Role

_REFLECTION = re.compile(r"<reflection>.*?</reflection>", re.DOTALL)
_CHARACTERS_PER_TOKEN = 4
_LONGEST_ECHO = 2_000


@dataclass(frozen=True)
class Scene:
    """What a script can tell of a conversation."""

    messages: Sequence[ModelMessage]
    role: Role | None

    @cached_property
    def prompt(self) -> str:
        """The newest prompt; notes that come along with results or hold nothing but a reflection are none."""
        for message in reversed(self.messages):
            if isinstance(message, ModelRequest) and not any(map(_is_result, message.parts)):
                said = "\n".join(_text(part) for part in message.parts if isinstance(part, UserPromptPart))
                if asked := _REFLECTION.sub("", said).strip():
                    return asked
        return ""

    @cached_property
    def results(self) -> list[tuple[str, str]]:
        """The results that the model is shown now, with the names of their tools."""
        last = self.messages[-1] if self.messages else None
        parts = last.parts if isinstance(last, ModelRequest) else []
        return [(part.tool_name, _text(part)) for part in parts if isinstance(part, ToolReturnPart)]

    @cached_property
    def result(self) -> str:
        return "\n".join(text for _, text in self.results)

    @cached_property
    def texts(self) -> list[str]:
        """Everything that was said, instructions included."""
        found = []
        for message in self.messages:
            found += [message.instructions or ""] if isinstance(message, ModelRequest) else []
            found += [_text(part) for part in message.parts]
        return found

    @cached_property
    def count(self) -> int:
        parts = [part for message in self.messages if isinstance(message, ModelRequest) for part in message.parts]
        return sum(map(_is_result, parts))

    @cached_property
    def digest(self) -> str:
        said = json.dumps([self.role, self.texts], ensure_ascii=False)
        return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:16]

    def taken(self, script: Script, number: int) -> int:
        """Count how often a turn was taken in this conversation."""
        mark = {"script": script.name, "turn": number}
        answers = [message.provider_details or {} for message in self.messages if isinstance(message, ModelResponse)]
        return sum(mark.items() <= details.items() for details in answers)

    def meets(self, when: When) -> bool:
        return (
            (when.role is None or self.role in when.role)
            and (when.prompt is None or re.search(when.prompt, self.prompt) is not None)
            and (when.result is None or any(re.search(when.result, text) for _, text in self.results))
            and (when.tool is None or any(tool == when.tool for tool, _ in self.results))
            and (when.anywhere is None or any(re.search(when.anywhere, text) for text in self.texts))
            and (when.reflection is None or when.reflection == any("<reflection>" in text for text in self.texts))
            and (when.results is None or when.results == self.count)
        )

    def marks(self, when: When) -> dict[str, str]:
        """Return what a script can repeat: the named groups of the turn's patterns, the newest prompt and result."""
        results = [text for _, text in self.results]
        among = ((when.prompt, [self.prompt]), (when.result, results), (when.anywhere, self.texts))
        found = [re.search(pattern, text) for pattern, texts in among if pattern for text in texts]
        groups = {name: value or "" for match in found if match for name, value in match.groupdict().items()}
        echoes = {**groups, "prompt": self.prompt, "result": self.result}
        return {f"{{{{{name}}}}}": value[:_LONGEST_ECHO] for name, value in echoes.items()}


def _filled(value: Any, marks: Mapping[str, str]) -> Any:
    """Put what the marks stand for in their places."""
    match value:
        case str():
            return reduce(lambda text, mark: text.replace(*mark), marks.items(), value)
        case dict():
            return {name: _filled(inner, marks) for name, inner in value.items()}
        case list():
            return [_filled(inner, marks) for inner in value]
        case _:
            return value


def _is_result(part: ModelRequestPart) -> bool:
    return isinstance(part, ToolReturnPart)


def _text(part: ModelRequestPart | ModelResponsePart) -> str:
    match part:
        case TextPart(content=text) | SystemPromptPart(content=text):
            return text
        case UserPromptPart(content=str() as text):
            return text
        case UserPromptPart(content=several):
            return "\n".join(str(getattr(each, "content", each)) for each in several if not hasattr(each, "data"))
        case ToolReturnPart():
            return part.model_response_str()
        case RetryFeedbackPart():
            return str(part.content)
        case ToolCallPart():
            return f"{part.tool_name} {part.args_as_json_str()}"
        case _:
            return ""


class RehearsalModel(Model[None]):
    """One request's view of a script: what it is asked for, and how often it was asked before without an answer."""

    def __init__(self, script: Script, *, role: Role | None = None, tries: int | None = None) -> None:
        super().__init__()
        self.script = script
        self._role = role
        self._tries = tries

    @property
    def model_name(self) -> str:
        return self.script.name

    @property
    def system(self) -> str:
        return REHEARSAL

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        _, wanted = self.prepare_request(model_settings, model_request_parameters)
        scene = Scene(messages, self._role)
        number, turn = self._take(scene)
        if turn.after_s:
            await asyncio.sleep(turn.after_s)
        if turn.fail is not None:
            self.script.failed[scene.digest] = self.script.failed.get(scene.digest, 0) + 1
            raise self._failure(turn.fail, turn.retry_after_s)
        return self._response(scene, number, turn, wanted)

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        response = await self.request(messages, model_settings, model_request_parameters)
        yield CompletedStreamedResponse(response, model_request_parameters=model_request_parameters, replay_events=True)

    def _take(self, scene: Scene) -> tuple[int, ScriptedTurn]:
        failed = self.script.failed.get(scene.digest, 0) if self._tries is None else self._tries
        for number, turn in enumerate(self.script.turns, start=1):
            if not scene.meets(turn.when):
                continue
            if turn.fail is not None and turn.times is not None and failed >= turn.times:
                failed -= turn.times
            elif turn.fail is not None or turn.times is None or scene.taken(self.script, number) < turn.times:
                return number, turn
        shown = scene.result or scene.prompt
        raise raised.ModelRequestRejectedError(
            self.script.name, f"the script has no turn for role {self._role} after {shown[:200]!r}"
        )

    def _response(self, scene: Scene, number: int, turn: ScriptedTurn, wanted: ModelRequestParameters) -> ModelResponse:
        parts: list[ModelResponsePart] = []
        marks = scene.marks(turn.when)
        if turn.reply is not None:
            parts.append(TextPart(_filled(turn.reply, marks)))
        for place, call in enumerate(turn.call):
            parts.append(ToolCallPart(call.tool, _filled(call.arguments, marks), f"call_{scene.digest}_{place}"))
        if turn.value is not None:
            value = _filled(turn.value, marks)
            tool = wanted.output_tools[0].name if wanted.output_tools else None
            said = ToolCallPart(tool, value, f"call_{scene.digest}_0") if tool else TextPart(json.dumps(value))
            parts.append(said)
        return ModelResponse(
            parts=parts,
            usage=_usage(scene, parts),
            model_name=self.script.name,
            provider_name=REHEARSAL,
            provider_details={"scripted": True, "script": self.script.name, "turn": number},
            finish_reason="tool_call" if any(isinstance(part, ToolCallPart) for part in parts) else "stop",
        )

    def _failure(self, kind: Fault, retry_after_s: float | None) -> raised.ModelAPIError:
        name, told = self.script.name, f"the script says so: {kind}"
        match kind:
            case "rate_limit":
                return raised.ModelRateLimitError(name, told, retry_after=retry_after_s)
            case "overloaded":
                return raised.ModelOverloadedError(name, told, retry_after=retry_after_s)
            case "server_error":
                return raised.ModelServerError(name, told)
            case "timeout":
                return raised.ModelTimeoutError(name, told)
            case "cut":
                return raised.ModelConnectionError(name, told, phase="read")
            case "malformed":
                failure = raised.ModelAPIError(name, told)
                failure.__cause__ = ValueError(told)
                return failure
            case "context_overflow":
                return raised.ModelContextWindowExceededError(name, told)
            case "refused":
                return raised.ModelRequestRejectedError(name, told)


def _usage(scene: Scene, parts: Sequence[ModelResponsePart]) -> RequestUsage:
    """Guess the tokens, so that limits of tokens can be rehearsed too."""
    read, written = sum(map(len, scene.texts)), sum(len(_text(part)) for part in parts)
    return RequestUsage(
        input_tokens=read // _CHARACTERS_PER_TOKEN + 1, output_tokens=written // _CHARACTERS_PER_TOKEN + 1
    )
