"""Every way in which a model does not answer, by one name each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from skep.errors import ModelUnavailable
from skep.models.spec import ModelSpec

if TYPE_CHECKING:
    from pydantic_ai.exceptions import ModelAPIError

    from skep.models.prices import Spend

FailureKind = Literal[
    "rate_limit",
    "overloaded",
    "server_error",
    "timeout",
    "cut",
    "malformed",
    "invalid_output",
    "context_overflow",
    "refused",
    "too_long",
    "circuit_open",
]

LONGEST_MESSAGE = 600
#: A wait that nobody would sit through is not believed.
LONGEST_WAIT_S = 3600.0

_HINTS: dict[FailureKind, str] = {
    "rate_limit": "wait, raise the limit at the provider, or configure a second provider in chat_models",
    "overloaded": "try again later, or configure a second provider in chat_models",
    "server_error": "try again; the provider's status page may say more",
    "timeout": "raise tasks.model_timeout_s, or use a faster model",
    "cut": "try again; the connection to the provider broke",
    "malformed": "see that base_url leads to a server that speaks the provider's protocol",
    "invalid_output": "ask more strictly, or use a model that supports structured output",
    "context_overflow": "shorten the conversation",
    "refused": "check the key, the model's id and base_url in chat_models",
    "too_long": "ask for long results as files",
    "circuit_open": "wait until the provider is tried again, or configure a second one in chat_models",
}

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\s]+")


class ModelFailure(ModelUnavailable):
    """A model did not answer, or not in a way that can be used.

    `spend` is there where an answer came and was paid for but cannot be used. `earlier` are the failures of the models
    that were asked before.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: FailureKind,
        provider: str,
        model: str = "",
        status_code: int | None = None,
        retry_after_s: float | None = None,
        spend: Spend | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint or _HINTS[kind])
        self.kind = kind
        self.provider = provider
        self.model = model
        self.status_code = status_code
        self.retry_after_s = retry_after_s
        self.spend = spend
        self.earlier: tuple[ModelFailure, ...] = ()

    @property
    def name(self) -> str:
        """The model that failed: provider/id."""
        return f"{self.provider}/{self.model}"

    @property
    def tried(self) -> tuple[str, ...]:
        """Every model that was asked, this one last."""
        return (*(each.name for each in self.earlier), self.name)


def failure_of(
    spec: ModelSpec, kind: FailureKind, message: str, *, spend: Spend | None = None, hint: str | None = None
) -> ModelFailure:
    """Make a failure of a model, in words that can be shown: no key, no control characters, not too long."""
    told = f"{spec.name}: {_shown(message, spec.key)}"
    return ModelFailure(told, kind=kind, provider=spec.provider, model=spec.title, spend=spend, hint=hint)


def translate(error: Exception, spec: ModelSpec) -> ModelFailure:
    """Turn whatever pydantic-ai, a provider's SDK or its adapter raised into a failure."""
    from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError

    failure = failure_of(spec, _kind(error), _message(error))
    if isinstance(error, ModelHTTPError):
        failure.status_code = error.status_code
    if isinstance(error, ModelAPIError) and error.retry_after is not None:
        failure.retry_after_s = min(max(0.0, error.retry_after), LONGEST_WAIT_S)
    return failure


def _kind(error: Exception) -> FailureKind:
    from pydantic_ai import exceptions as raised

    from skep.models.transport import TooManyBytes

    if any(isinstance(cause, TooManyBytes) for cause in _chain(error)):
        return "too_long"
    match error:
        case raised.ModelConnectionError() if not isinstance(error, raised.ModelTimeoutError):
            return "cut" if error.phase == "read" else "overloaded"
        case raised.ModelAPIError():
            return _api_kind(error)
        case TimeoutError():
            return "timeout"
        case raised.ContentFilterError() | raised.UserError():
            return "refused"
        case _:
            return "malformed"


def _api_kind(error: ModelAPIError) -> FailureKind:
    from pydantic_ai import exceptions as raised

    # The first that fits: some of these are kinds of others.
    kinds: tuple[tuple[type[ModelAPIError], FailureKind], ...] = (
        (raised.ModelRateLimitError, "rate_limit"),
        (raised.ModelUnavailableError, "overloaded"),
        (raised.ModelServerError, "server_error"),
        (raised.ModelRequestTimeout, "timeout"),
        (raised.ModelTimeoutError, "timeout"),
        (raised.ModelContextWindowExceededError, "context_overflow"),
        (raised.ModelRequestRejectedError, "refused"),
        (raised.ModelQuotaExceededError, "refused"),
    )
    for kind_of_error, kind in kinds:
        if isinstance(error, kind_of_error):
            return kind
    if isinstance(error, raised.ModelHTTPError):
        return "server_error" if error.status_code >= 500 else "refused"
    return "malformed" if isinstance(error.__cause__, ValueError) else "server_error"


def _message(error: Exception) -> str:
    from pydantic_ai.exceptions import ModelHTTPError

    if isinstance(error, ModelHTTPError):
        return f"status {error.status_code}: {_told(error.body)}"
    return str(error) or type(error).__name__


def _told(body: object) -> str:
    """Find the sentence in the body of an error, wherever its provider puts it."""
    inner = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(inner, dict) and isinstance(inner.get("message"), str):
        return str(inner["message"])
    return inner if isinstance(inner, str) else json.dumps(inner, default=str)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _shown(message: str, key: str | None) -> str:
    if key:
        message = message.replace(key, "[secret]")
    message = _CONTROL.sub(" ", message[: 4 * LONGEST_MESSAGE]).strip()
    return message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]}…"
