"""What can go wrong in an attempt, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from skep.models.failures import FailureKind as ModelKind

#: A tool could not do what it was asked for.
ToolKind = Literal[
    "tool_timeout",
    "sandbox_lost",
    "sandbox_disabled",
    "missing_package",
    "empty_result",
    "tool_refused",
    "tool_error",
    "invalid_arguments",
    "unknown_tool",
]
#: The attempt as a whole came to nothing.
AttemptKind = Literal["loop", "gave_up", "low_confidence", "limit", "denied", "cancelled", "unknown"]

FailureKind: TypeAlias = ModelKind | ToolKind | AttemptKind
KINDS: tuple[FailureKind, ...] = (*get_args(ModelKind), *get_args(ToolKind), *get_args(AttemptKind))

#: The most of a failure's text, and of a check's, that is kept.
LONGEST_MESSAGE = 2_000
LONGEST_OUTPUT = 4_000


@dataclass(frozen=True, slots=True)
class Check:
    """Something that was executed and tells whether the work is right: an exit code, test output, a schema's error."""

    what: str
    passed: bool
    output: str

    def __str__(self) -> str:
        """Say it in one paragraph, for a record and for a model."""
        return (
            f"{self.what}: {'passed' if self.passed else 'failed'}\n{shortened(self.output, LONGEST_OUTPUT)}".rstrip()
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of an attempt, and what is known about it."""

    kind: FailureKind
    message: str
    provider: str | None = None
    tool: str | None = None
    #: How long the other side asks to be left alone.
    retry_after_s: float | None = None
    check: Check | None = None
    #: What could be installed against it, and the tool that could be used instead.
    packages: tuple[str, ...] = ()
    ecosystem: str = "python"
    fallback: str | None = None
    #: What whoever raised it advises.
    hint: str | None = None

    @property
    def where(self) -> str:
        """The tool or the provider that failed, if one did."""
        return self.tool or self.provider or ""

    def __str__(self) -> str:
        """Say it in one line."""
        named = f"{self.kind} ({self.where})" if self.where else self.kind
        return f"{named}: {shortened(' '.join(self.message.split()), LONGEST_MESSAGE)}"


def shortened(text: str, longest: int) -> str:
    """Keep the two ends of a long text, with a word on what is missing: errors tend to stand at the end."""
    if len(text) <= longest:
        return text
    head, tail = longest // 3, longest - longest // 3
    return f"{text[:head]} … {len(text) - longest} characters left out … {text[-tail:]}"
