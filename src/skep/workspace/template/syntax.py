"""Say in plain words why a text is not YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

#: Where in the text, and then what is wrong and what to do.
Explanation = tuple[int, tuple[str, str | None]]

#: A value that begins with a character that YAML keeps for itself.
_RESERVED = re.compile(r" *(?:- +|[\w.-]+: +)*(?P<value>[@`%*&!|>{\[][^\n#]*)")
_TAB = re.compile(r"^ *\t", re.MULTILINE)

#: What the parser says, what it means, and what to do about it.
_MEANINGS: tuple[tuple[str, str, str], ...] = (
    (
        "mapping values are not allowed",
        "there is a colon where none can be",
        'put a text that holds ": " in quotes, and end each name with a colon',
    ),
    (
        "expected <block end>",
        "this line does not fit the ones above it",
        "begin fields and hyphens that belong together in the same column",
    ),
    ("unknown escape character", "a backslash means something in double quotes", "use single quotes"),
    ("cannot start any token", "a value cannot begin with this character in YAML", "put it in quotes"),
    ("expected alphabetic or numeric", "a value cannot begin with * or & in YAML", "put it in quotes"),
    ("found undefined tag", "a value begins with !, which YAML keeps for itself", "put it in quotes"),
)
#: The same for what the parser notices only later; the mistake is where it began to read.
_BEGINNINGS: tuple[tuple[str, str, str], ...] = (
    ("could not find expected ':'", "this line has no colon after its name", "write fields as name: value"),
    ("unexpected end of stream", "a quotation mark is opened here and never closed", "close it, or do without quotes"),
    ("expected ',' or", "a bracket is opened here and not closed", "close it, and part entries by commas"),
)


def explain(text: str, error: yaml.YAMLError) -> Iterator[Explanation]:
    """Turn an error of the parser into what a person has to change."""
    if isinstance(error, yaml.reader.ReaderError):
        yield error.position, (f"holds the character U+{error.character:04X}", "take it out")
        return
    assert isinstance(error, yaml.MarkedYAMLError)  # all others of a parser
    problem = error.problem or error.context or ""
    mark = error.problem_mark or error.context_mark
    offset = min(mark.index, len(text)) if mark else 0
    begin = text.rfind("\n", 0, offset) + 1
    if tabs := [found.end() - 1 for found in _TAB.finditer(text, begin)]:
        yield from ((at, ("is indented with a tab", "indent with blanks")) for at in tabs)
    elif (reserved := _RESERVED.match(text, begin)) and _unquoted(reserved["value"]):
        yield reserved.start("value"), (_beginning(reserved["value"]), _quoted(reserved["value"]))
    else:
        yield _meaning(problem, offset, error)


def _meaning(problem: str, offset: int, error: yaml.MarkedYAMLError) -> Explanation:
    for fragment, *told in _BEGINNINGS:
        if fragment in problem and error.context_mark:
            return error.context_mark.index, (told[0], told[1])
    for fragment, *told in _MEANINGS:
        if fragment in problem:
            return offset, (told[0], told[1])
    return offset, (f"is not valid YAML: {problem}", None)


def _unquoted(value: str) -> bool:
    """Tell a value that lacks its quotes from a list or a mapping that only lacks its end."""
    return not value.startswith(("{", "["))


def _beginning(value: str) -> str:
    return f"a value cannot begin with {value[0]} in YAML"


def _quoted(value: str) -> str:
    shown = value.strip()[:60].replace("\\", "\\\\").replace('"', '\\"')
    return f'put it in quotes: "{shown}"'
