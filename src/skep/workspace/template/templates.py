"""The templates of this machine: those that Skep ships, and a person's own in one folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from skep.errors import Conflict, NotFound, TemplateInvalid
from skep.state.names import check_name, shown
from skep.workspace.template.chain import Chain, resolve
from skep.workspace.template.draft import draft, write_new
from skep.workspace.template.problem import Problem
from skep.workspace.template.review import Review, review
from skep.workspace.template.source import LARGEST_BYTES, Source
from skep.workspace.template.template import Template

SHIPPED = Path(__file__).parent / "shipped"

Problems = list[Problem]
Origin = Literal["shipped", "own"]


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """One line of the list. A template that cannot be used has `problems`, and nothing but its name is known."""

    name: str
    description: str
    extends: str | None
    origin: Origin
    file: Path
    problems: int = 0


class Templates:
    """Templates by name: `<name>.yaml` in the folder or, if there is none, the shipped one of that name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list(self) -> list[TemplateInfo]:
        """List every template, also those that are wrong."""
        return [_info(file, self._resolve(file)) for _, file in sorted(self._files().items())]

    def names(self) -> Sequence[str]:
        return sorted(self._files())

    def show(self, name: str) -> Template:
        """Return a template with all that it extends; TemplateInvalid says everything that is wrong with it."""
        return self.chain(name).template

    def chain(self, name: str) -> Chain:
        """Return a template as `show` does, with the names of those it is made of."""
        file = self.file(name)
        found = self._resolve(file)
        if isinstance(found, Chain):
            return found
        raise refusal(found, file)

    def source(self, name: str) -> str:
        """Return the text of the file, as it is."""
        file = self.file(name)
        content = _read(file)
        if isinstance(content, Problem):
            raise refusal([content], file)
        return content.decode("utf-8", "replace")

    def check(self, which: str | Path) -> Problems:
        """List what is wrong with a template, given by its name or by the path of a file."""
        found = self._resolve(self.locate(which))
        return [] if isinstance(found, Chain) else found

    def file(self, name: str) -> Path:
        """Find the file of a template."""
        check_name("template", name)
        for folder in (self.folder, SHIPPED):
            if os.path.lexists(file := folder / f"{name}.yaml"):
                return file
        raise NotFound(f"there is no template {name}", hint=self._suggestion(name))

    def locate(self, which: str | Path) -> Path:
        """Find a file as a person says it: what has a slash or ends in .yaml is its path, the rest is a name."""
        if isinstance(which, str) and "/" not in which and not which.endswith((".yaml", ".yml")):
            return self.file(which)
        if "\0" in str(which) or not os.path.lexists(which):
            raise NotFound(f"there is no file {_shown(Path(which))}", hint="skep template list")
        return Path(which)

    def new(self, name: str, *, base: str | None = None) -> Path:
        """Write a commented template that can be used as it is; never over one that is there."""
        check_name("template", name)
        if base is not None:
            self.show(base)
        if (SHIPPED / f"{name}.yaml").exists():
            hint = f"skep template new my-{name} --extends {name}"
            raise Conflict(f"{name} is a template that Skep ships", hint=hint)
        file = self.folder / f"{name}.yaml"
        write_new(file, draft(name, base))
        return file

    def _files(self) -> dict[str, Path]:
        return {file.stem: file for folder in (SHIPPED, self.folder) for file in folder.glob("*.yaml")}

    def _suggestion(self, name: str) -> str:
        if (self.folder / f"{name}.yml").exists():
            return f"call the file {name}.yaml: mv {self.folder}/{name}.yml {self.folder}/{name}.yaml"
        close = get_close_matches(name, self.names(), n=1)
        return f"did you mean {close[0]}?" if close else f"skep template list, or: skep template new {name}"

    def _resolve(self, file: Path) -> Chain | Problems:
        return resolve(file.stem, _review(file), lambda name: _review(self.file(name)))


def refusal(found: Sequence[Problem], file: Path) -> TemplateInvalid:
    """Say in one error everything that must change in the file."""
    told = "\n".join(f"{_shown(file)}:{problem}" for problem in found)
    return TemplateInvalid(told, hint=f"correct it, then run: skep template check {file.stem}")


def _info(file: Path, found: Chain | Problems) -> TemplateInfo:
    origin: Origin = "shipped" if file.parent == SHIPPED else "own"
    if not isinstance(found, Chain):
        return TemplateInfo(file.stem, "", None, origin, file, len(found))
    extends = found.names[1] if len(found.names) > 1 else None
    return TemplateInfo(file.stem, found.template.description, extends, origin, file)


def _review(file: Path) -> Review:
    content = _read(file)
    if isinstance(content, Problem):
        return Review(Source(""), None, (content,))
    return review(content, name=file.stem)


def _read(file: Path) -> bytes | Problem:
    """Return the bytes of a file, one more than are allowed at most, or why there are none."""
    try:
        # O_NONBLOCK: a named pipe in this place must not make Skep wait for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return os.read(descriptor, LARGEST_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        return Problem(1, 1, "", f"cannot be read: {reason}", f"look at it: ls -ld {_shown(file)}")
    return Problem(1, 1, "", "is not a regular file", "put a YAML file in its place")


def _shown(file: Path) -> str:
    text = str(file)
    return text if text.isprintable() and len(text) < 500 else shown(text)
