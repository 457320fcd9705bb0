"""What goes to a model and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skep.models.failures import ModelFailure
from skep.models.prices import Spend
from skep.models.spec import Level, Role

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_ai import ToolDefinition
    from pydantic_ai.messages import ModelMessage, ModelResponse

    from skep.models.sight import Look


@dataclass(frozen=True, slots=True)
class Request:
    """One question. With a `schema` the answer has to be a value of it.

    `avoid` names providers, or single models as provider/id, that answer only where no other is configured. `tries`
    says how often this very request was made before without an answer, where the caller has that on record; only a
    rehearsal looks at it, so that a failure which its script has once happens once, whatever process asks. `look` gives
    the pictures of the conversation to a model that reads images.
    """

    role: Role
    messages: Sequence[ModelMessage]
    tools: Sequence[ToolDefinition] = ()
    schema: type[BaseModel] | None = None
    level: Level | None = None
    avoid: frozenset[str] = frozenset()
    max_tokens: int | None = None
    tries: int | None = None
    look: Look | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said. `tried` names every model that was asked, the one that answered last; `failures` says why.

    A model is there twice if it was asked again without the pictures that it had refused.
    """

    response: ModelResponse
    spend: Spend
    duration_ms: int
    scripted: bool
    tried: tuple[str, ...]
    value: BaseModel | None = None
    failures: tuple[ModelFailure, ...] = ()
