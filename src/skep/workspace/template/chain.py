"""Put a template together from those that it extends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from skep.errors import NotFound
from skep.workspace.template.problem import Problem
from skep.workspace.template.review import Review, at_odds
from skep.workspace.template.template import Template, extend

_DEEPEST = 8

Find = Callable[[str], Review]
Fault = tuple[str, str | None]  # what is wrong, and what to do


@dataclass(frozen=True, slots=True)
class Chain:
    """A template with all that it extends, and the names of those it is made of, its own first."""

    template: Template
    names: tuple[str, ...]


def resolve(name: str, first: Review, find: Find) -> Chain | list[Problem]:
    """Follow `extends` to its end; every problem is told at its place in the first file."""
    bases: list[Template] = []
    wanted = first.extends
    while wanted is not None:
        found = _base(wanted, [name, *(base.name for base in bases)], find)
        if not isinstance(found, Template):
            return _sorted([*first.problems, first.source.problem(("extends",), *found)])
        bases.append(found)
        wanted = found.extends
    if first.template is None:
        return list(first.problems)
    whole = reduce(extend, reversed([first.template, *bases]))
    odds = list(at_odds(first.source, whole.security.network, whole.security.allowed_domains))
    return odds or Chain(whole, (name, *(base.name for base in bases)))


def _base(wanted: str, names: Sequence[str], find: Find) -> Template | Fault:
    path = " -> ".join([*names, wanted])
    if wanted in names:
        return f"goes round in a circle: {path}", "let one of them extend something else"
    if len(names) >= _DEEPEST:
        return f"is a chain of more than {_DEEPEST} templates: {path}", "put some of them together"
    try:
        found = find(wanted)
    except NotFound as error:
        return error.message + (f": {path}" if len(names) > 1 else ""), error.hint
    if found.template is None:
        return f"needs {wanted}, which is wrong itself: {path}", f"skep template check {wanted}"
    return found.template


def _sorted(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda one: (one.line, one.column))
