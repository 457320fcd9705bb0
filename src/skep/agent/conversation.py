"""What was said so far between a worker and its model, attempt after attempt: it is added to, or shortened."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeVar, cast

from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)

from skep.agent.bounds import clip
from skep.agent.observations import Observation, Refused, Trouble, pictures_of
from skep.models.sight import mark

T = TypeVar("T")

#: What only Skep itself says in these, so that nobody's text is taken for its own.
_RESERVED = re.compile(r"<(?=\s*/?\s*(?:reflection|memory|failures|skep)\b)", re.IGNORECASE)
_GOOD_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BAD_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
#: The most of one text of a model that is sent back to it, and what is left of old texts when room is needed.
_TEXT_CHARS = 64 << 10
_OLD_CHARS = 400


@dataclass(frozen=True, slots=True)
class Thought:
    """What a model answered. `elapsed_s` is what the task has taken by then, without the time it waited for a person.

    `usd` is None for an answer that cannot be priced.
    """

    response: ModelResponse
    tokens: int
    usd: Decimal | float | None
    at: datetime
    elapsed_s: float


@dataclass(slots=True)
class Tally:
    """What a task has used."""

    acts: int = 0
    requests: int = 0
    tokens: int = 0
    usd: Decimal = Decimal(0)
    elapsed_s: float = 0.0

    def add(self, thought: Thought) -> None:
        self.requests += 1
        self.tokens += thought.tokens
        self.usd += Decimal(str(thought.usd or 0))
        self.elapsed_s = max(self.elapsed_s, thought.elapsed_s)


@dataclass(slots=True)
class Conversation:
    """The messages of a task, and what it has used. A next attempt goes on with it, so nothing is done twice."""

    messages: list[ModelMessage] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    step: int = 0
    #: How many calls in a row could not be read.
    unread: int = 0
    _answers: list[ToolReturnPart] = field(default_factory=list)
    #: The ids of calls so far: some providers take none twice.
    _taken: set[str] = field(default_factory=set)

    @classmethod
    def begin(cls, instructions: str, prompt: str, *, history: Sequence[ModelMessage] = ()) -> Conversation:
        """Begin with Skep's own instructions, the thread so far, and what the person asks for."""
        first = ModelRequest(parts=[SystemPromptPart(instructions)])
        asked = ModelRequest(parts=[UserPromptPart(disarmed(prompt))])
        return cls([first, *history, asked])

    def say(self, text: str) -> None:
        """Add what Skep has to say, such as a reflection; the model hears it with its next request."""
        self.settle()
        self._add([UserPromptPart(text)])

    def hear(self, thought: Thought) -> list[ToolCallPart]:
        """Add an answer, cleaned of what a provider would not take back; return the calls in it."""
        self.tally.add(thought)
        parts: list[ModelResponsePart] = []
        for index, part in enumerate(thought.response.parts):
            parts.append(_cleaned(part, f"call_{self.step}_{index}", self._taken))
        self.messages.append(replace(thought.response, parts=parts))
        return [part for part in parts if isinstance(part, ToolCallPart)]

    def answer(self, call: ToolCallPart, observation: Observation) -> None:
        """Keep what came of a call until all calls of the answer have been seen to."""
        self._answers.append(
            ToolReturnPart(
                call.tool_name,
                show(observation),
                call.tool_call_id,
                metadata=mark(pictures_of(observation)),
                outcome="failed" if isinstance(observation, Refused | Trouble) else "success",
            )
        )

    def forget_arguments(self, call: ToolCallPart) -> ToolCallPart:
        """Keep no more than the beginning of arguments that could not be read: they would be sent again every time."""
        short = _with(call, args={"unreadable": clip(_as_text(call.args), _OLD_CHARS)})
        last = self.messages[-1]
        if isinstance(last, ModelResponse):
            parts = [short if part is call else part for part in last.parts]
            self.messages[-1] = replace(last, parts=parts)
        return short

    def settle(self, note: str = "It was not run.") -> None:
        """Close the last answer: each of its calls has to have a result before the model is asked again."""
        last = self.messages[-1] if self.messages else None
        if isinstance(last, ModelResponse):
            done = {part.tool_call_id for part in self._answers}
            calls = [part for part in last.parts if isinstance(part, ToolCallPart) and part.tool_call_id not in done]
            rest = [ToolReturnPart(part.tool_name, note, part.tool_call_id, outcome="interrupted") for part in calls]
            if self._answers or rest:
                self._add([*self._answers, *rest])
        self._answers = []

    def compact(self, *, keep: int = 4) -> int:
        """Shorten what is older than the last `keep` messages, or all of it if that was done already.

        Return how many characters were saved.
        """
        older = max(0, len(self.messages) - keep)
        saved = self._shorten(older)
        return saved or self._shorten(len(self.messages))

    def _shorten(self, count: int) -> int:
        before = sum(_size(message) for message in self.messages)
        self.messages[:count] = [_shortened(message) for message in self.messages[:count]]
        return before - sum(_size(message) for message in self.messages)

    def _add(self, parts: Sequence[ModelRequestPart]) -> None:
        last = self.messages[-1] if self.messages else None
        if isinstance(last, ModelRequest):
            self.messages[-1] = replace(last, parts=[*last.parts, *parts])
        else:
            self.messages.append(ModelRequest(parts=list(parts)))


def disarmed(text: str) -> str:
    """Return a text of anybody's without the marks in which only Skep speaks."""
    return _RESERVED.sub("&lt;", text)


def show(observation: Observation) -> str:
    """Return an observation as the model gets it: one JSON object, out of which no output can break."""
    told: dict[str, Any] = {"kind": observation.kind}
    told |= observation.model_dump(mode="json", exclude={"stamp"}, exclude_defaults=True)
    return _RESERVED.sub(r"\\u003c", json.dumps(told, ensure_ascii=False))


def spoken(response: ModelResponse) -> str:
    """Return the text of an answer."""
    return "\n".join(part.content for part in response.parts if isinstance(part, TextPart) and part.content)


def _cleaned(part: ModelResponsePart, call_id: str, taken: set[str]) -> ModelResponsePart:
    if isinstance(part, TextPart):
        return replace(part, content=clip(part.content, _TEXT_CHARS))
    if not isinstance(part, ToolCallPart):
        return part
    given = part.tool_call_id
    known = call_id if given in taken or not _GOOD_ID.fullmatch(given) else given
    while known in taken:
        known += "_"
    taken.add(known)
    name = _BAD_IN_NAMES.sub("_", part.tool_name)[:64] or "_"
    return _with(part, tool_call_id=known, tool_name=name)


def _shortened(message: ModelMessage) -> ModelMessage:
    if isinstance(message, ModelRequest):
        return replace(message, parts=[_shortened_request(part) for part in message.parts])
    return replace(message, parts=[_shortened_response(part) for part in message.parts])


def _shortened_request(part: ModelRequestPart) -> ModelRequestPart:
    match part:
        case ToolReturnPart(content=str(content)):
            return _with(part, content=_short(content, _OLD_CHARS), metadata=None)
        case UserPromptPart(content=str(content)):
            return replace(part, content=_short(content, 8 * _OLD_CHARS))
        case _:
            return part


def _shortened_response(part: ModelResponsePart) -> ModelResponsePart:
    match part:
        case TextPart():
            return replace(part, content=_short(part.content, _OLD_CHARS))
        case ToolCallPart() if len(text := _as_text(part.args)) > 2 * _OLD_CHARS:
            return _with(part, args={"shortened": clip(text, _OLD_CHARS)})
        case _:
            return part


def _short(text: str, most: int) -> str:
    """Cut a text, unless that has been done: the remark about it makes it a little longer than it may be."""
    return clip(text, most) if len(text) > 2 * most else text


def _with(part: T, **changes: object) -> T:
    """Replace fields of a part whose type leaves open which kind of tool it is for."""
    changed: Any = part
    return cast(T, replace(changed, **changes))


def _as_text(args: object) -> str:
    return args if isinstance(args, str) else json.dumps(args or {}, ensure_ascii=False, default=str)


def _size(message: ModelMessage) -> int:
    return sum(len(str(getattr(part, "content", "") or getattr(part, "args", ""))) for part in message.parts)
