"""Read the YAML of a template: plain values, where each stands, and what is no part of the format.

Templates use the plain part of YAML: mappings, lists, text and numbers, as YAML 1.2 reads them (`on` is a text). Tags,
anchors and aliases are refused, so that a small file stays a small value and nothing in it names a type of Python's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from skep.workspace.template.problem import FieldPath, Problem, spell
from skep.workspace.template.syntax import explain

LARGEST_BYTES = 65_536
_DEEPEST = 16

_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[-+]?(\.[0-9]{1,18}|[0-9]{1,18}(\.[0-9]{0,18})?)([eE][-+]?[0-9]{1,3})?")


@dataclass(slots=True)
class Source:
    """The values of one file, and where in its text each of them stands."""

    text: str
    data: Any = None
    offsets: dict[FieldPath, int] = field(default_factory=dict)
    #: Numbers as they are written: 3.10 is a version, and not the number 3.1.
    written: dict[FieldPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    #: Whether the text could be read to its end; if not, its values tell nothing.
    whole: bool = False

    def problem(self, path: FieldPath, message: str, hint: str | None = None) -> Problem:
        """Put a problem at a field or, when it is absent, at the closest thing around it."""
        known = (path[:length] for length in range(len(path), 0, -1) if path[:length] in self.offsets)
        offset = self.offsets[found] if (found := next(known, None)) else 0
        return self.problem_at(offset, spell(path), message, hint)

    def problem_at(self, offset: int, name: str, message: str, hint: str | None = None) -> Problem:
        line = self.text.count("\n", 0, offset) + 1
        return Problem(line, offset - self.text.rfind("\n", 0, offset), name, message, hint)


def read(content: bytes) -> Source:
    """Read the bytes of a template; what is wrong with them is in the problems of the source."""
    if len(content) > LARGEST_BYTES:
        return _hopeless("is larger than 64 kB", "a template is a few kilobytes at most")
    try:
        source = Source(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        before = Source(content[: error.start].decode("utf-8"))
        found = before.problem_at(len(before.text), "", f"byte {error.start} is not UTF-8 text", "save it as UTF-8")
        return Source("", problems=[found])
    try:
        _Composer(source).compose()
    except yaml.YAMLError as error:
        source.problems += [source.problem_at(at, "", *told) for at, told in explain(source.text, error)]
    except _TooDeep as error:
        source.problems.append(source.problem_at(error.offset, "", "is nested too deeply", "templates are flat"))
    else:
        source.whole = True
    return source


class _TooDeep(Exception):
    def __init__(self, offset: int) -> None:
        super().__init__()
        self.offset = offset


class _Composer:
    """Turn the events of YAML into values, keeping their places."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._events: Iterator[Any] = yaml.parse(source.text, Loader=yaml.SafeLoader)

    def compose(self) -> None:
        next(self._events)  # the start of the stream
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return
        self._source.data = self._value(next(self._events), ())
        next(self._events)  # the end of the document
        after = next(self._events)
        if isinstance(after, yaml.DocumentStartEvent):
            self._refuse(after, (), "holds a second document", "keep one template to a file")

    def _value(self, event: Any, path: FieldPath) -> Any:
        if len(path) > _DEEPEST:
            raise _TooDeep(event.start_mark.index)
        if isinstance(event, yaml.AliasEvent):
            name = f"*{event.anchor}"[:40]
            hint = f'write the value out, or put it in quotes if it is a text: "{name}"'
            return self._refuse(event, path, f"uses the alias {name}", hint)
        if event.anchor is not None:
            self._refuse(event, path, f"has the anchor &{event.anchor[:40]}", "take it away; there are no aliases here")
        if event.tag is not None:
            self._refuse(event, path, f"has the tag {_shown_tag(event.tag)}", "take it away; values are plain here")
        match event:
            case yaml.MappingStartEvent():
                return self._mapping(path)
            case yaml.SequenceStartEvent():
                return self._list(path)
            case _:
                return self._scalar(event, path)

    def _mapping(self, path: FieldPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            name = self._name(event, path)
            here = (*path, name)
            if name in found:
                first = self._source.problem(here, "").line
                self._refuse(event, here, f"is given twice, first on line {first}", "keep one of the two")
            else:
                self._source.offsets[here] = event.start_mark.index
            value = self._value(next(self._events), here)
            found.setdefault(name, value)
        return found

    def _name(self, event: Any, path: FieldPath) -> str:
        if isinstance(event, yaml.ScalarEvent):
            return str(event.value)
        self._refuse(event, (*path, "?"), "is a name that is not a word", "write fields as name: value")
        self._value(event, (*path, "?"))
        return "?"

    def _list(self, path: FieldPath) -> list[Any]:
        found: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            here = (*path, len(found))
            self._source.offsets[here] = event.start_mark.index
            found.append(self._value(event, here))
        return found

    def _scalar(self, event: Any, path: FieldPath) -> Any:
        text = str(event.value)
        if not event.implicit[0]:  # in quotes, or a block of text
            return text
        value = _plain(text)
        if isinstance(value, int | float):
            self._source.written[path] = text
        return value

    def _refuse(self, event: Any, path: FieldPath, message: str, hint: str) -> None:
        self._source.problems.append(self._source.problem_at(event.start_mark.index, spell(path), message, hint))


def _plain(text: str) -> Any:
    word = text if text in (text.lower(), text.upper(), text.capitalize()) else "-"
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text


def _shown_tag(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")[:40]


def _hopeless(message: str, hint: str) -> Source:
    return Source("", problems=[Problem(1, 1, "", message, hint)])
