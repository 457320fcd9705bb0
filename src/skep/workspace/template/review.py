"""What is wrong with the text of a template, field by field, in words for the person who wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from skep.errors import InvalidRequest
from skep.state.names import check_name, shown
from skep.workspace.template.problem import FieldPath, Problem, spell
from skep.workspace.template.requirement import node_package, python_requirement
from skep.workspace.template.source import Source, read
from skep.workspace.template.template import Part, Template, host_rules

_MOST = 100
_LINE_EACH = "put each entry on a line of its own, after a hyphen"

_WORDS = {
    "missing": "is required",
    "model_type": "should hold fields of its own",
    "tuple_type": "should be a list",
    "string_type": "should be text",
    "int_type": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "finite_number": "should be a finite number",
    "string_pattern_mismatch": "should be the name of a program, such as vim",
}
#: Versions may be written without quotes, though YAML takes 3.10 for a number.
_VERSIONS: tuple[FieldPath, ...] = (("python", "version"), ("nodejs", "version"))


@dataclass(frozen=True, slots=True)
class Review:
    """One file, read: the template as it is written, or None and what is wrong with it."""

    source: Source
    template: Template | None
    problems: tuple[Problem, ...] = ()

    @property
    def extends(self) -> str | None:
        """The template that it extends, also if other fields are wrong."""
        given = self.source.data.get("extends") if isinstance(self.source.data, dict) else None
        return given if isinstance(given, str) and is_name(given) else None


def review(content: bytes, *, name: str | None = None) -> Review:
    """Read a template, or list everything that is wrong with it; `name` is the one that its file calls for."""
    source = read(content)
    if not source.whole:
        return Review(source, None, tuple(source.problems))
    if not isinstance(source.data, dict):
        what = "is empty" if source.data is None else "should hold fields with values"
        return Review(source, None, (Problem(1, 1, "", what, "begin with: skep template new NAME"),))
    template, problems = _judge(source, name)
    if problems:
        return Review(source, None, tuple(_capped(sorted(problems, key=lambda one: (one.line, one.column)))))
    return Review(source, template)


def _judge(source: Source, name: str | None) -> tuple[Template | None, list[Problem]]:
    data = _settled(_with_versions(source), Template)
    template, problems = None, [*source.problems, *_misnamed(source, data, name), *_senseless(source, data)]
    try:
        template = Template.model_validate(data)
    except ValidationError as error:
        told = {problem.field for problem in problems}
        found = [_described(source, one) for one in error.errors(include_url=False)]
        problems += [problem for problem in found if problem.field not in told]
    return template, problems


def _with_versions(source: Source) -> dict[str, Any]:
    data: dict[str, Any] = dict(source.data)
    for part, name in _VERSIONS:
        if (part, name) in source.written:
            data[str(part)] = {**data[str(part)], name: source.written[part, name]}
    return data


def _settled(data: dict[str, Any], part: type[Part]) -> dict[str, Any]:
    """Read a field without a value as YAML's writers mean it: an empty part, an empty list, or not said."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        annotation = part.model_fields[name].annotation if name in part.model_fields else None
        inner = part_of(annotation)
        if inner and (value is None or isinstance(value, dict)):
            found[name] = _settled(value or {}, inner)
        elif value is None and annotation is not None:
            found |= {name: []} if "tuple" in str(annotation) else {}
        else:
            found[name] = value
    return found


def part_of(annotation: Any) -> type[Part] | None:
    """Return the part of a template that a field holds, None if it holds plain values."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Part):
            return candidate
    return None


def _misnamed(source: Source, data: dict[str, Any], name: str | None) -> Iterator[Problem]:
    given = data.get("name")
    if name is None or given == name or not isinstance(given, str) or not is_name(given):
        return
    hint = f"write name: {name}, or call the file {given}.yaml" if is_name(name) else f"call the file {given}.yaml"
    yield source.problem(("name",), f"is {given}, and the file is called {shown(name)}", hint)


def is_name(text: str) -> bool:
    """Say whether a template can be called so."""
    try:
        return check_name("template", text) == text
    except InvalidRequest:
        return False


def _senseless(source: Source, data: dict[str, Any]) -> Iterator[Problem]:
    """Find what is right by itself and makes no sense beside something else."""
    lists: tuple[tuple[str, str, Callable[[str], object]], ...] = (
        ("python", "dependencies", _python_key),
        ("nodejs", "dependencies", lambda text: node_package(text).name),
        ("security", "allowed_domains", host_rules),
        ("security", "read_only_paths", str),
        ("security", "writable_paths", str),
    )
    for part, name, key in lists:
        yield from _repeated_in(source, (part, name), key)
    yield from _contradictory(source, data)
    security = data.get("security")
    if "extends" not in data and isinstance(security, dict):  # else the whole chain decides
        yield from at_odds(source, security.get("network", "none"), _entries(data, ("security", "allowed_domains")))


def _repeated_in(source: Source, path: FieldPath, key: Callable[[str], object]) -> Iterator[Problem]:
    seen: dict[object, str] = {}
    for index, entry in enumerate(_entries(source.data, path)):
        try:
            same = seen.setdefault(key(entry), f"{path[-1]}[{index}]") if isinstance(entry, str) else None
        except InvalidRequest:  # told on its own
            continue
        if same not in {None, f"{path[-1]}[{index}]"}:
            yield source.problem((*path, index), f"says the same as {same}", "keep one of the two")


def _contradictory(source: Source, data: dict[str, Any]) -> Iterator[Problem]:
    read_only = _entries(data, ("security", "read_only_paths"))
    for index, entry in enumerate(_entries(data, ("security", "writable_paths"))):
        if isinstance(entry, str) and entry in read_only:
            here = ("security", "writable_paths", index)
            yield source.problem(here, f"{entry[:60]!r} is among the read-only paths too", "keep one of the two")


def at_odds(source: Source, network: object, domains: Sequence[object]) -> Iterator[Problem]:
    """Find a network and domains that make no sense together."""
    if network == "allowed" and not domains:
        hint = "list some under allowed_domains, or write network: none"
        yield source.problem(("security", "network"), "is allowed, and no domain is", hint)
    if network in ("none", "packages") and domains:
        here = ("security", "allowed_domains")
        yield source.problem(here, f"has no effect with network: {network}", "write network: allowed")


def _entries(data: Any, path: FieldPath) -> list[Any]:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, list) else []


def _python_key(text: str) -> object:
    from packaging.utils import canonicalize_name

    requirement = python_requirement(text)
    return canonicalize_name(requirement.name), str(requirement.marker)


def _described(source: Source, details: ErrorDetails) -> Problem:
    path, kind, value = details["loc"], details["type"], details["input"]
    context = details.get("ctx", {})
    match kind:
        case "refused":
            return source.problem(path, context["message"], context["hint"])
        case "extra_forbidden":
            return _unknown(source, path)
        case "missing":
            return source.problem(path, "is required", _example(path))
        case "literal_error" if path == ("version",):
            hint = "write version: 1, or bring Skep up to date"
            return source.problem(path, f"is {_quoted(value)}, and this Skep reads templates of version 1", hint)
        case "too_long" | "string_too_long":
            what = "entries" if kind == "too_long" else "characters"
            return source.problem(path, f"has {len(value)} {what}, and {context['max_length']} are the most")
    said = _WORDS.get(kind) or details["msg"].replace("Input should", "should")
    return source.problem(path, f"{said}, got {_quoted(value)}", _remedy(kind, value))


def _unknown(source: Source, path: FieldPath) -> Problem:
    known = fields_at(path[:-1])
    close = get_close_matches(str(path[-1]), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
    return source.problem(path, "is not a known field", hint)


def fields_at(path: FieldPath) -> list[str]:
    """List the fields that the part at this path may have."""
    part: type[Part] = Template
    for name in path:
        part = part_of(part.model_fields[str(name)].annotation) or part
    return list(part.model_fields)


def _example(path: FieldPath) -> str:
    return {"version": "begin the file with version: 1"}.get(str(path[-1]), f"add {spell(path)}: …")


def _remedy(kind: str, value: Any) -> str | None:
    if kind == "string_type" and isinstance(value, int | float):
        return f"put it in quotes: '{json.dumps(value)}'"
    if kind == "string_type" and isinstance(value, dict):
        return "write it as one text, in quotes if it holds a colon"
    return _LINE_EACH if kind == "tuple_type" else None


def _quoted(value: Any) -> str:
    if isinstance(value, dict):
        return "fields"
    if isinstance(value, list | tuple):
        return "a list"
    shown = json.dumps(value) if value is not None else "nothing"
    return shown if len(shown) <= 60 else f"{shown[:57]}…"


def _capped(problems: list[Problem]) -> list[Problem]:
    if len(problems) <= _MOST:
        return problems
    rest = len(problems) - _MOST
    return [*problems[:_MOST], Problem(problems[_MOST].line, 1, "", f"{rest} more problems from here on")]
