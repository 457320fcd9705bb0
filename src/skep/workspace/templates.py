"""The templates of this machine: those that Skep ships, and a person's own in one folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from skep.errors import Conflict, InvalidRequest, NotFound, TemplateInvalid
from skep.state.names import check_name, shown
from skep.workspace.problem import Problem
from skep.workspace.review import Review, review
from skep.workspace.source import LARGEST_BYTES
from skep.workspace.template import Template, extend

SHIPPED = Path(__file__).parent / "shipped"
_DEEPEST = 8
Problems = list[Problem]
Origin = Literal["shipped", "own"]


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """One line of the list. A template that cannot be used has `problems`."""

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
        own = sorted(self.folder.glob("*.yaml")) if self.folder.is_dir() else []
        files = {file.stem: file for file in (*sorted(SHIPPED.glob("*.yaml")), *own)}
        return [self._info(files[name]) for name in sorted(files)]

    def names(self) -> Sequence[str]:
        return sorted({file.stem for folder in (SHIPPED, self.folder) for file in folder.glob("*.yaml")})

    def show(self, name: str) -> Template:
        """Return a template with all that it extends; TemplateInvalid says everything that is wrong with it."""
        file = self.file(name)
        found = self._resolve(file)
        if isinstance(found, Template):
            return found
        raise refusal(found, file)

    def source(self, name: str) -> str:
        """Return the text of the file, as it is."""
        return _read(self.file(name)).decode("utf-8", "replace")

    def chain(self, name: str) -> tuple[str, ...]:
        """Name the templates that this one is made of, itself first."""
        self.show(name)
        names = [name]
        while (template := self._review(self.file(names[-1])).template) and template.extends:
            names.append(template.extends)
        return tuple(names)

    def check(self, which: str | Path) -> Problems:
        """List what is wrong with a template, given by its name or by the path of a file."""
        found = self._resolve(self.file(which))
        return [] if isinstance(found, Template) else found

    def file(self, which: str | Path) -> Path:
        """Find the file of a template; what has a slash or ends in .yaml is the path itself."""
        if isinstance(which, Path) or "/" in which or which.endswith((".yaml", ".yml")):
            return Path(which)
        name = check_name("template", which)
        for folder in (self.folder, SHIPPED):
            if (file := folder / f"{name}.yaml").exists():
                return file
        raise NotFound(f"there is no template {name}", hint=self._suggestion(name))

    def new(self, name: str, *, base: str | None = None) -> Path:
        """Write a commented template that can be used as it is; never over one that is there."""
        from skep.workspace.draft import draft, write_new

        check_name("template", name)
        if base is not None:
            self.show(base)
        if (SHIPPED / f"{name}.yaml").exists():
            raise Conflict(
                f"{name} is a template that Skep ships", hint=f"skep template new my-{name} --extends {name}"
            )
        file = self.folder / f"{name}.yaml"
        write_new(file, draft(name, base))
        return file

    def _suggestion(self, name: str) -> str:
        if (self.folder / f"{name}.yml").exists():
            return f"call the file {name}.yaml: mv {self.folder}/{name}.yml {self.folder}/{name}.yaml"
        close = get_close_matches(name, self.names(), n=1)
        return f"did you mean {close[0]}?" if close else f"skep template list, or: skep template new {name}"

    def _info(self, file: Path) -> TemplateInfo:
        origin: Origin = "shipped" if file.parent == SHIPPED else "own"
        try:
            problems = len(self.check(file))
            written = self._review(file).template
        except InvalidRequest:  # it cannot be read, which `check` says in full
            problems, written = 1, None
        if written is None:
            return TemplateInfo(file.stem, "", None, origin, file, problems)
        return TemplateInfo(file.stem, written.description, written.extends, origin, file, problems)

    def _review(self, file: Path) -> Review:
        return review(_read(file), name=file.stem)

    def _resolve(self, file: Path) -> Template | Problems:
        """Put a template together from the chain that it extends, the one at the end of the chain first."""
        first = self._review(file)
        if first.template is None:
            return list(first.problems)
        chain = [first.template]
        while (wanted := chain[-1].extends) is not None:
            found = self._base(wanted, [template.name for template in chain])
            if isinstance(found, str):
                return [first.source.problem(("extends",), *found.split("\n"))]
            chain.append(found)
        whole = chain.pop()
        while chain:
            whole = extend(whole, chain.pop())
        return _at_odds(first, whole) or whole.model_copy(update={"extends": None})

    def _base(self, wanted: str, names: Sequence[str]) -> Template | str:
        """Return the next template of a chain or, in two lines, what is wrong and what to do."""
        path = " -> ".join([*names, wanted])
        if wanted in names:
            return f"goes round in a circle: {path}\nlet one of them extend something else"
        if len(names) >= _DEEPEST:
            return f"is a chain of more than {_DEEPEST} templates: {path}\nput some of them together"
        try:
            found = self._review(self.file(wanted))
        except NotFound as error:
            via = f" ({path})" if len(names) > 1 else ""
            return f"{error.message}{via}\n{error.hint}"
        if found.template is None:
            return f"{path}: {wanted} is wrong in {_places(len(found.problems))}\nskep template check {wanted}"
        return found.template


def refusal(found: Sequence[Problem], file: Path) -> TemplateInvalid:
    """Say in one error everything that must change in the file."""
    hint = f"correct it, then run: skep template check {file.stem if file.suffix == '.yaml' else file}"
    return TemplateInvalid("\n".join(f"{file}:{problem}" for problem in found), hint=hint)


def _at_odds(first: Review, whole: Template) -> list[Problem]:
    """Find what makes no sense once everything is put together."""
    security = whole.security
    if security.network == "allowed" and not security.allowed_domains:
        said = 'is "allowed", and no domain is', "list some under allowed_domains, or write network: none"
        return [first.source.problem(("security", "network"), *said)]
    if security.network != "allowed" and security.allowed_domains:
        said = f'has no effect with network: "{security.network}"', "write network: allowed"
        return [first.source.problem(("security", "allowed_domains"), *said)]
    return []


def _places(count: int) -> str:
    return "one place" if count == 1 else f"{count} places"


def _read(file: Path) -> bytes:
    """Return the bytes of a file, one more than are allowed at most."""
    try:
        # O_NONBLOCK: a named pipe in this place must not make Skep wait for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise TemplateInvalid(f"{shown_path(file)} is not a regular file", hint="put a YAML file in its place")
            return os.read(descriptor, LARGEST_BYTES + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {shown_path(file)}", hint="skep template list") from error
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        hint = "check its permissions: ls -ld FILE"
        raise TemplateInvalid(f"{shown_path(file)} cannot be read: {reason}", hint=hint) from error


def shown_path(file: Path) -> str:
    text = str(file)
    return text if text.isprintable() and len(text) < 500 else shown(text)
