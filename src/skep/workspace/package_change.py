"""Which packages came, went or changed their version, read from the files of an environment that differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict

from skep.workspace.layers.overlay import Change, Entry, opened

ENVIRONMENTS = (".venv", "node_modules")
_PYTHON = re.compile(r"\.venv/lib/python[0-9.]+/site-packages/([^/]+)-([^/-]+)\.dist-info")
_NODE = re.compile(r"node_modules/((?:@[^/]+/)?[^@./][^/]*)/package\.json")
_MOST_BYTES = 1 << 20

Ecosystem = Literal["python", "node"]


class PackageChange(BaseModel):
    """One package; a version is None where it is not there."""

    model_config = ConfigDict(frozen=True)

    ecosystem: Ecosystem
    name: str
    before: str | None
    after: str | None

    def text(self) -> str:
        where = f"{self.ecosystem} package {self.name}"
        if self.before is None:
            return f"+ {where} {self.after}"
        if self.after is None:
            return f"- {where} {self.before}"
        return f"~ {where} {self.before} -> {self.after}"


def package_changes(changes: Iterable[Change]) -> list[PackageChange]:
    """Sum up what differs in the environments."""
    before: dict[tuple[Ecosystem, str], str] = {}
    after: dict[tuple[Ecosystem, str], str] = {}
    for change in changes:
        for found, entry in ((before, change.before), (after, change.after)):
            if entry is not None:
                found.update(_package(entry))
    return [
        PackageChange(ecosystem=key[0], name=key[1], before=before.get(key), after=after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _package(entry: Entry) -> Iterator[tuple[tuple[Ecosystem, str], str]]:
    if entry.kind == "folder" and (python := _PYTHON.fullmatch(entry.path)):
        yield ("python", _plain(python[1]).lower().replace("_", "-")), _plain(python[2])
    elif entry.kind == "file" and (node := _NODE.fullmatch(entry.path)):
        yield ("node", _plain(node[1])), _version(entry)


def _version(entry: Entry) -> str:
    with open(opened(entry), "rb") as file:
        text = file.read(_MOST_BYTES)
    try:
        return _plain(str(json.loads(text)["version"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unknown"


def _plain(text: str) -> str:
    """Return text from a workspace so that it can be printed."""
    return "".join(char if char.isprintable() else "?" for char in text)[:100]
