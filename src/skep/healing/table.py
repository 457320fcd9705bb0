"""The decision table: which tiers a failure may go through, in that order, and what is said when none is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from skep.healing.failure import FailureKind
from skep.healing.remedies import Tier


@dataclass(frozen=True, slots=True)
class Row:
    """What is done about one kind of failure.

    `breaks`: it speaks against the provider or the tool, so its circuit counts it. `cause` and `guidance` are what the
    note of a task that failed of it says.
    """

    means: str
    tiers: tuple[Tier, ...]
    cause: str
    guidance: str
    breaks: bool = False


_AGAIN = "Nothing about the task has to change: `skep task retry` once it works again."

TABLE: Mapping[FailureKind, Row] = MappingProxyType(
    {
        "rate_limit": Row(
            "a provider takes no more requests for now",
            (1, 3),
            "The provider limits how often it may be asked.",
            "Wait, raise the limit at the provider, or configure a second one.",
        ),
        "overloaded": Row(
            "a provider cannot take the request (503, 529, no connection)",
            (1, 3),
            "The provider was overloaded or could not be reached.",
            _AGAIN + " A second provider in chat_models stands in for one that is overloaded.",
            breaks=True,
        ),
        "server_error": Row(
            "a provider fails (other 5xx)",
            (1, 3),
            "The provider failed on its own side.",
            _AGAIN,
            breaks=True,
        ),
        "timeout": Row(
            "a model does not answer in time",
            (1, 3),
            "The model did not answer in time.",
            "Retry later, or raise `tasks.model_timeout_s`.",
            breaks=True,
        ),
        "cut": Row(
            "an answer ends in the middle",
            (1, 3),
            "The connection to the provider broke in the middle of an answer.",
            _AGAIN,
            breaks=True,
        ),
        "malformed": Row(
            "what a provider sends cannot be read",
            (1, 3),
            "What the provider sent is not what its protocol says.",
            "See that the model's `base_url` leads to a server of that protocol.",
            breaks=True,
        ),
        "invalid_output": Row(
            "structured output does not fit its schema",
            (1, 2, 3),
            "The model did not keep to the form that was asked for.",
            "Use a model that supports structured output for this, or ask for less at once.",
        ),
        "context_overflow": Row(
            "the conversation is longer than the model takes",
            (1, 3),
            "The conversation did not fit the model, even shortened.",
            "Split the task, or keep large texts in files and read parts of them.",
        ),
        "refused": Row(
            "a provider turns the request down (other 4xx, a content filter)",
            (3,),
            "The provider refused the request.",
            "Check the key and the model's name; else put the request in other words.",
        ),
        "too_long": Row(
            "an answer goes on without an end",
            (2, 3),
            "The model's answer was longer than Skep takes.",
            "Ask for long results as files, written piece by piece.",
        ),
        "circuit_open": Row(
            "a provider or a tool has failed too often lately to be asked now",
            (1, 2, 3),
            "It had failed too often shortly before.",
            "Wait a minute, or go another way: a second provider, another tool.",
        ),
        "tool_timeout": Row(
            "a tool runs out of time",
            (1, 2, 3),
            "The tool needed more time than it had, even doubled.",
            "Run what takes long in the background and poll it, or do it in parts.",
            breaks=True,
        ),
        "sandbox_lost": Row(
            "the sandbox died under a call",
            (1, 3),
            "The sandbox died each time.",
            "Look at `skep doctor`, and whether the work needs more memory than the sandbox may have.",
        ),
        "sandbox_disabled": Row(
            "the hive has its sandbox switched off; the worker is told, and goes on without",
            (),
            "The work needs a sandbox, and the hive has none.",
            "`skep hive set HIVE sandbox_enabled=on` allows one.",
        ),
        "missing_package": Row(
            "a program needs a package that is not installed",
            (1, 2, 3),
            "A package that the work needs is not installed.",
            "Allow it to be installed, do it by `skep workspace install`, or add it to the hive's template.",
        ),
        "empty_result": Row(
            "a tool comes back with nothing",
            (1, 2, 3),
            "The tool found nothing.",
            "Ask it differently, or use another source.",
        ),
        "tool_refused": Row(
            "a tool, or a server behind it, answers that the request is wrong",
            (2, 3),
            "What was sent to the tool is not what it takes.",
            "Read the tool's answer: it says what it does not accept.",
        ),
        "tool_error": Row(
            "a tool fails",
            (2, 3),
            "The tool itself failed.",
            "See its output; another way to the same result may not need it.",
            breaks=True,
        ),
        "invalid_arguments": Row(
            "a model keeps calling a tool with arguments that it does not take",
            (2, 3),
            "The model did not keep to the form of a tool's arguments.",
            "Use a stronger model for this.",
        ),
        "unknown_tool": Row(
            "a model keeps calling a tool that there is not",
            (2, 3),
            "The model asked for a tool that the hive does not have.",
            "Say in the prompt what is to be used, or allow the tool to the hive.",
        ),
        "loop": Row(
            "the worker goes round in circles, and did so after a warning",
            (2, 3),
            "The worker repeated itself without getting on.",
            "Say more exactly what is wanted, or split the task.",
        ),
        "gave_up": Row(
            "the worker says that it could not do it",
            (2, 3),
            "The worker gave up.",
            "Its reply says what stood in the way; with that out of the way, retry.",
        ),
        "low_confidence": Row(
            "the worker is not sure of its answer",
            (1,),
            "The worker was not sure of its answer.",
            "Check the answer before it is used.",
        ),
        "limit": Row(
            "a limit of the task is reached; what there is by then is the reply",
            (3,),
            "The task reached one of its limits.",
            "Raise the limit in `budgets`, or split the task.",
        ),
        "denied": Row(
            "an act is not allowed; the worker is told, and goes on without",
            (),
            "An act that the task needs was not allowed.",
            "Allow it, or ask for another way.",
        ),
        "cancelled": Row(
            "somebody ended the task",
            (),
            "Somebody ended the task.",
            "`skep task retry` begins it anew.",
        ),
        "unknown": Row(
            "anything else",
            (3,),
            "It failed in a way that there is no remedy for.",
            "The program log has the whole of it.",
        ),
    }
)
