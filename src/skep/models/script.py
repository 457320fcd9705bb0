"""The script of a rehearsal: turns in order, each with the conditions under which it is taken."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from skep.errors import ScriptInvalid
from skep.models.spec import Role

SCRIPTS = Path(__file__).with_name("scripts")
LARGEST_BYTES = 1024 * 1024

Fault = Literal[
    "rate_limit", "overloaded", "server_error", "timeout", "cut", "malformed", "context_overflow", "refused"
]
_STATUSES: dict[object, Fault] = {429: "rate_limit", 500: "server_error", 503: "overloaded", 529: "overloaded"}


def _compile(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return pattern


def _several(value: object) -> object:
    return value if isinstance(value, list | tuple) else (value,)


Pattern = Annotated[str, AfterValidator(_compile)]
Roles = Annotated[tuple[Role, ...], BeforeValidator(_several)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class When(_Part):
    """The conditions of a turn; all that are given have to hold. Patterns are searched, not matched from the start."""

    role: Roles | None = None
    """What the model is asked for, one role or several."""
    prompt: Pattern | None = None
    """Found in the newest prompt."""
    result: Pattern | None = None
    """Found in the results that the model is shown now: those of its last calls."""
    tool: str | None = None
    """One of these results is of this tool."""
    anywhere: Pattern | None = None
    """Found in any message or instruction of the conversation."""
    reflection: bool | None = None
    """Whether a reflection on an earlier attempt is part of the conversation."""
    results: int | None = None
    """How many results of calls the conversation holds."""


class ScriptedCall(_Part):
    """A call of a tool. Arguments that are a text are sent as they are, even if they are no JSON."""

    tool: str = Field(min_length=1)
    arguments: dict[str, Any] | str = Field(default_factory=dict)


Calls = Annotated[tuple[ScriptedCall, ...], BeforeValidator(_several)]
FaultName = Annotated[Fault, BeforeValidator(lambda value: _STATUSES.get(value, value))]


class ScriptedTurn(_Part):
    """What the model does once: it says something, calls tools, gives a value, or fails."""

    when: When = When()
    times: int | None = Field(default=None, ge=1)
    """How often the turn is taken in one conversation at most; for a failure, how often one request fails."""
    after_s: float = Field(default=0.0, ge=0, le=3600)
    """Seconds to think before."""
    reply: str | None = None
    """Text. {{prompt}} and {{result}} stand for the newest prompt and result, {{name}} for a named group."""
    call: Calls = ()
    """One call or several; texts in the arguments may hold the same marks as a reply."""
    value: dict[str, Any] | None = None
    """A value, where the request wants one of a schema."""
    fail: FaultName | None = None
    """A failure instead of an answer: a name, or one of the statuses 429, 500, 503 and 529."""
    retry_after_s: float | None = Field(default=None, ge=0)
    """Seconds that the failure asks to wait."""

    @model_validator(mode="after")
    def _do_one_thing(self) -> Self:
        said, calls = self.reply is not None, bool(self.call)
        if (said or calls) + (self.value is not None) + (self.fail is not None) != 1:
            raise ValueError("should have a reply, a call (or both), a value, or fail")
        return self


class _File(_Part):
    about: str = ""
    turns: tuple[ScriptedTurn, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Script:
    """A script that was read; `failed` counts the failures of requests whose callers keep no count of their own."""

    name: str
    about: str
    turns: tuple[ScriptedTurn, ...]
    failed: dict[str, int]


def built_in() -> tuple[str, ...]:
    """Name the scripts that ship with Skep."""
    return tuple(sorted(path.stem for path in SCRIPTS.glob("*.yaml")))


def find_script(name: str) -> Path:
    """Return the file of a script: a built-in one by its bare name, any other by its path."""
    return SCRIPTS / f"{name}.yaml" if name in built_in() else Path(name)


def load_script(name: str) -> Script:
    """Read a script by its path, or a built-in one by its name."""
    path = find_script(name)
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        hint = f"give the path of a script, or one of those that ship with Skep: {', '.join(built_in())}"
        raise ScriptInvalid(f"the script {name} cannot be read: {error.strerror}", hint=hint) from error
    return read_script(content, str(path))


def read_script(content: bytes, name: str) -> Script:
    """Read the bytes of a script; what is wrong with them is told with its line."""
    if len(content) > LARGEST_BYTES:
        raise ScriptInvalid(f"{name} is larger than 1 MB", hint="a script is a few kilobytes")
    try:
        root = yaml.compose(content, Loader=yaml.SafeLoader)
        data = yaml.safe_load(content)
        found = _File.model_validate(data)
    except yaml.YAMLError as error:
        raise ScriptInvalid(f"{name}{_line(error)}: {_problem(error)}", hint="see docs/guides/models.md") from error
    except ValidationError as error:
        raise ScriptInvalid(_first(error, root, name), hint="see docs/guides/models.md") from error
    return Script(Path(name).stem, found.about, found.turns, {})


def _line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}" if mark else ""


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or getattr(error, "reason", None) or "is no YAML")


def _first(error: ValidationError, root: yaml.Node | None, name: str) -> str:
    """Tell the first of the mistakes, with the line of the closest thing to it that is written down."""
    told = error.errors(include_url=False)[0]
    node, path = root, ""
    for step in told["loc"]:
        inner = _child(node, step)
        if inner is None:
            path += f".{step}" if told["type"] in {"missing", "extra_forbidden"} else ""
            break
        if inner is not node:
            path += f"[{step}]" if isinstance(step, int) else f".{step}"
        node = inner
    line = node.start_mark.line + 1 if node else 1
    message = told["msg"].removeprefix("Value error, ")
    return f"{name}, line {line}: {path.lstrip('.') or 'the script'}: {message[0].lower()}{message[1:]}"


def _child(node: yaml.Node | None, step: int | str) -> yaml.Node | None:
    match node, step:
        case yaml.MappingNode(), str():
            return next((value for key, value in node.value if key.value == step), None)
        case yaml.SequenceNode(), int() if step < len(node.value):
            found: yaml.Node = node.value[step]
            return found
        case yaml.Node(), 0:  # one thing where several may be
            return node
        case _:
            return None
