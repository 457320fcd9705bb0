"""What is wrong with a config.json, field by field, in words for the person who wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from skep.config.position import FieldPath, Outline, Position, nearest, outline, spell
from skep.config.secrets import has_secret, is_secret_name, key_variable, mask_text
from skep.config.settings import Settings

_DEEPEST = 64

_WORDS = {
    "missing": "is required",
    "model_type": "should be an object",
    "tuple_type": "should be a list",
    "string_type": "should be text",
    "int_type": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "bool_type": "should be true or false",
    "finite_number": "should be a finite number",
}
_PATTERNS = {
    r"^[a-z][a-z0-9_-]{0,62}$": "should be lower-case letters, digits, - and _",
    r"^[a-z0-9][a-z0-9-]{0,62}$": "should be lower-case letters, digits and -",
    r"^\S+$": "should hold no blanks",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to put right. `field` is empty when the text as a whole is wrong."""

    field: str
    position: Position | None
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        place = f" (line {self.position.line}, column {self.position.column})" if self.position else ""
        return f"{self.field or 'the file'}{place}: {self.message}"


def examine(text: str) -> Settings | list[Problem]:
    """Parse a config.json, or list everything that is wrong with it."""
    data = _parse(text)
    if isinstance(data, Problem):
        return [data]
    places = outline(text)
    problems = [*_repeated(text, places), *_misplaced_secrets(text, places, data)]
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        told = {problem.field for problem in problems}
        described = [_describe(text, places, data, one) for one in error.errors(include_url=False)]
        problems += [problem for problem in described if problem.field not in told]
    else:
        if not problems:
            return settings
    return sorted(problems, key=lambda problem: _order(problem.position))


def _parse(text: str) -> dict[str, Any] | Problem:
    constants: list[str] = []
    try:
        data = json.loads(text, parse_constant=constants.append)
    except json.JSONDecodeError as error:
        return Problem("", Position.of(text, error.pos), f"is not valid JSON: {_plain(error, text)}")
    except ValueError:  # Python's guard against numbers that take for ever to read
        return Problem("", None, "holds a number of too many digits")
    except RecursionError:
        return Problem("", None, "is nested too deeply")
    if constants:  # NaN and Infinity, which Python reads and JSON does not know
        place = Position.of(text, text.find(constants[0]))
        return Problem("", place, f"is not valid JSON: {constants[0]} is no JSON number")
    if _depth(data) > _DEEPEST:
        return Problem("", None, "is nested too deeply")
    if not isinstance(data, dict):
        return Problem("", None, "should hold one JSON object, { … }")
    return data


def _plain(error: json.JSONDecodeError, text: str) -> str:
    if not text.strip():
        return "it is empty"
    if error.pos >= len(text.rstrip()):
        return "it ends too early"
    before = text[: error.pos].rstrip()
    if "double quotes" in error.msg and before.endswith(","):
        return "there is a comma too many"
    return error.msg[0].lower() + error.msg[1:]


def _depth(data: Any) -> int:
    depth, level = 0, [data]
    while level and depth <= _DEEPEST:
        depth += 1
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def _repeated(text: str, places: Outline) -> Iterator[Problem]:
    for path, offset in places.repeated:
        yield Problem(spell(path), Position.of(text, offset), "is given twice", "keep one of the two")


def _misplaced_secrets(text: str, places: Outline, data: Any) -> Iterator[Problem]:
    """Find values with the shape of a key, wherever they stand; a database password is let through."""
    for path in places.offsets:
        value = _value_at(data, path)
        if isinstance(value, str) and has_secret(value):
            yield _secret_problem(text, places, data, path)


def _secret_problem(text: str, places: Outline, data: Any, path: FieldPath) -> Problem:
    owner = _value_at(data, path[:-1])
    provider = owner.get("provider") if isinstance(owner, dict) else None
    variable = key_variable(provider) if isinstance(provider, str) and provider else "ANTHROPIC_API_KEY"
    return Problem(
        spell(path),
        _place(text, places, path),
        "looks like a secret, and secrets come from the environment only",
        f"take it out of the file and set the variable, for example: export {variable}=…",
    )


def _describe(text: str, places: Outline, data: Any, details: ErrorDetails) -> Problem:
    path = details["loc"]
    if details["type"] == "extra_forbidden":
        return _unknown_field(text, places, data, path)
    return Problem(spell(path), _place(text, places, path), _words(details) + _got(details))


def _unknown_field(text: str, places: Outline, data: Any, path: FieldPath) -> Problem:
    name = str(path[-1])
    if is_secret_name(name):
        return _secret_problem(text, places, data, path)
    known = fields_at(path[:-1])
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
    return Problem(spell(path), _place(text, places, path), "is not a known field", hint)


def fields_at(path: FieldPath) -> list[str]:
    """List the fields that the object at this path may have."""
    model: Any = Settings
    for name in path:
        if isinstance(name, str):
            annotation = model.model_fields[name].annotation
            model = get_args(annotation)[0] if get_args(annotation) else annotation
    return [field.alias or name for name, field in model.model_fields.items()]


def _words(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in _WORDS:
        return _WORDS[kind]
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(context["pattern"], f"should match {context['pattern']}")
    if kind == "value_error":
        return str(context["error"])
    return details["msg"].removeprefix("Value error, ").replace("Input should", "should")


def _got(details: ErrorDetails) -> str:
    """Quote a short wrong value; never a URL or an unchecked text that might hold a password."""
    value = details["input"]
    if details["type"] in {"missing", "value_error"} or isinstance(value, dict | list):
        return ""
    shown = mask_text(json.dumps(value, ensure_ascii=True))
    return f", got {shown}" if len(shown) <= 60 else f", got {shown[:57]}…"


def _value_at(data: Any, path: FieldPath) -> Any:
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _place(text: str, places: Outline, path: FieldPath) -> Position | None:
    offset = nearest(places.offsets, path)
    return None if offset is None else Position.of(text, offset)


def _order(position: Position | None) -> tuple[int, int]:
    return (position.line, position.column) if position else (0, 0)
