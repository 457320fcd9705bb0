"""The SKILL.md of a skill, read on the host as what it is: a file that an agent may have written."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skep.errors import InvalidRequest, NotFound

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_SCRIPT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_MOST_BYTES = 64 << 10
#: The time that YAML takes grows with the square of its depth.
_FRONT_CHARS = 8 << 10
_MOST_BRACKETS = 50
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Skill:
    """One skill. `idempotent`: it honours the key it is given; `fallback` is another for when it finds nothing."""

    shelf: str
    name: str
    idempotent: bool
    fallback: str | None
    scripts: frozenset[str]

    def require_script(self, script: str) -> None:
        if script not in self.scripts:
            known = ", ".join(sorted(self.scripts)) or "none"
            raise NotFound(f"the skill {self.shelf}/{self.name} has no script {script[:60]!r}", hint=f"it has: {known}")


def find_skill(shelves: Mapping[str, Path], skill: str) -> Skill:
    """Read a skill by its shelf and name. Links are not followed, and only so much is read."""
    shelf, _, name = skill.partition("/")
    if shelf not in shelves or not _NAME.fullmatch(name):
        raise NotFound(
            f"there is no skill {skill[:80]!r}", hint=f"name one as shelf/name; shelves: {', '.join(shelves)}"
        )
    try:
        with ExitStack() as stack:
            folder = _open(stack, str(shelves[shelf] / name), _FOLDER)
            metadata = _metadata(_read(stack, folder), skill)
            scripts = _open(stack, "scripts", _FOLDER, within=folder)
            names = frozenset(each for each in os.listdir(scripts) if _SCRIPT.fullmatch(each))  # noqa: PTH208
    except FileNotFoundError as error:
        raise NotFound(
            f"there is no skill {skill!r}, or it lacks SKILL.md or scripts", hint="list its shelf"
        ) from error
    except OSError as error:
        raise InvalidRequest(f"the skill {skill!r} cannot be read: {error.strerror}", hint="use another") from error
    fallback = metadata.get("fallback")
    return Skill(
        shelf=shelf,
        name=name,
        idempotent=metadata.get("idempotent") in ("true", True),
        fallback=fallback[:160] if isinstance(fallback, str) else None,
        scripts=names,
    )


def _open(stack: ExitStack, path: str, flags: int, *, within: int | None = None) -> int:
    fd = os.open(path, flags, dir_fd=within)
    stack.callback(os.close, fd)
    return fd


def _read(stack: ExitStack, folder: int) -> str:
    fd = _open(stack, "SKILL.md", _FILE, within=folder)
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
        raise InvalidRequest(f"SKILL.md is not a file of at most {_MOST_BYTES:,} bytes", hint="use another skill")
    return os.read(fd, _MOST_BYTES).decode(errors="replace")


def _metadata(text: str, skill: str) -> dict[str, Any]:
    """Return `metadata` of the front matter. Anchors are refused: a few of them can stand for any amount of text."""
    import yaml

    lines = text.splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in (stripped := [line.strip() for line in lines[1:]]):
        return {}
    front = "\n".join(lines[1 : stripped.index("---") + 1])
    if len(front) > _FRONT_CHARS or sum(map(front.count, "[{")) > _MOST_BRACKETS:
        raise InvalidRequest(f"the front matter of {skill!r} is too long or too deep", hint="use another skill")
    try:
        if any(getattr(event, "anchor", None) for event in yaml.parse(front, Loader=yaml.SafeLoader)):
            raise InvalidRequest(f"SKILL.md of {skill!r} uses anchors", hint="write each value where it belongs")
        found = yaml.safe_load(front)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the front matter of {skill!r} is not YAML", hint="use another skill") from error
    metadata = found.get("metadata") if isinstance(found, dict) else None
    return metadata if isinstance(metadata, dict) else {}
