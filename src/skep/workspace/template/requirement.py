"""Packages as a person asks for them: names and versions, and never a flag, a path or an address."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from skep.errors import InvalidRequest
from skep.state.names import shown
from skep.workspace.template.semver import Range

_LONGEST = 200
_PYTHON_HINT = "write a package as requests, requests>=2.31 or requests[socks]==2.32.*"
_NODE_HINT = "write a package as axios, axios@^1.7 or @scope/name@2.x"
_BARE_VERSION = re.compile(r"3(\.(0|[1-9][0-9]?)(\.(0|[1-9][0-9]?))?)?")
_NODE_NAME = re.compile(r"(?:@[a-z0-9~-][a-z0-9._~-]*/)?[a-z0-9~-][a-z0-9._~-]*")
_NODE_TAG = re.compile(r"[a-z][a-z0-9._-]{0,60}")
_FILES = (".whl", ".tar", ".tar.gz", ".tgz", ".zip", ".egg")


def python_requirement(text: str) -> Requirement:
    """Read one requirement of Python's (PEP 508) that names a package of the package index."""
    _refuse_foreign(text, _PYTHON_HINT)
    _refuse_path(text.partition(";")[0], text, _PYTHON_HINT)
    try:
        found = Requirement(text)
    except InvalidRequirement as error:
        raise _not_a_requirement(text, str(error)) from error
    if found.url:
        raise InvalidRequest(f"{shown(text)} is fetched from an address of its own", hint=_PYTHON_HINT)
    if canonicalize_name(found.name) == "python":
        raise InvalidRequest(f"{shown(text)} is the language itself", hint="say it in python.version")
    return found


def python_name(text: str) -> str:
    """Return the name of the package in the form in which names are compared."""
    return canonicalize_name(python_requirement(text).name)


def python_versions(text: str) -> SpecifierSet:
    """Read the Python that is wanted: 3.12, 3.12.4 or specifiers such as >=3.11,<3.14."""
    if bare := _BARE_VERSION.fullmatch(text):
        return SpecifierSet(f"=={text}" if bare[3] else f"=={text}.*")
    try:
        found = SpecifierSet(text) if text.strip() and text.isprintable() and len(text) <= _LONGEST else None
    except InvalidSpecifier:
        found = None
    if found is None:
        raise InvalidRequest(
            f"{shown(text)} is not a version of Python", hint='write "3.12", "3.12.4" or specifiers such as ">=3.11"'
        )
    if not any(found.contains(f"3.{minor}.{patch}") for minor in range(40) for patch in range(30)):
        raise InvalidRequest(f"no Python 3 fits {shown(text)}", hint='widen it, such as ">=3.11"')
    return found


@dataclass(frozen=True, slots=True)
class NodePackage:
    """A package of npm's registry, and the range or tag that is wanted; any version if it is empty."""

    name: str
    wanted: str = ""

    def __str__(self) -> str:
        return f"{self.name}@{self.wanted}" if self.wanted else self.name


def node_package(text: str) -> NodePackage:
    """Read `name`, `name@range` or `@scope/name@range`."""
    _refuse_foreign(text, _NODE_HINT)
    at = text.find("@", 1)
    name, wanted = (text, "") if at < 0 else (text[:at], text[at + 1 :])
    unscoped = name.partition("/")[2] if name.startswith("@") else name
    for part in (unscoped, wanted):
        _refuse_path(part, text, _NODE_HINT)
    if len(name) > 214 or not _NODE_NAME.fullmatch(name) or name in {"node_modules", "favicon.ico"}:
        raise InvalidRequest(f"{shown(name)} is not the name of a package", hint=_NODE_HINT)
    if name == "node":
        raise InvalidRequest(f"{shown(text)} is the runtime itself", hint="say it in nodejs.version")
    if at >= 0 and not wanted.strip():
        raise InvalidRequest(f"{shown(text)} has no version after the @", hint=_NODE_HINT)
    if wanted and not _NODE_TAG.fullmatch(wanted):
        Range.parse(wanted)
    return NodePackage(name, wanted)


def _refuse_foreign(text: str, hint: str) -> None:
    """Refuse what an installer would take for something other than the name of a package."""
    if not text.strip() or len(text) > _LONGEST or not text.isprintable() or text != text.strip():
        raise InvalidRequest(f"{shown(text)} is not the name of a package", hint=hint)
    if text.startswith("-"):
        raise InvalidRequest(f"{shown(text)} is a flag of an installer", hint=hint)
    if "://" in text or re.match(r"(git|file|npm|link|workspace|github|https?)[:+]", text.rpartition("@")[2].strip()):
        raise InvalidRequest(f"{shown(text)} is fetched from an address of its own", hint=hint)
    if text.startswith((".", "/", "~")):
        raise InvalidRequest(f"{shown(text)} is a path, not a package", hint=hint)


def _refuse_path(part: str, text: str, hint: str) -> None:
    """Refuse what installers open as a file: a slash, or the ending of a packed package."""
    if "/" in part or "\\" in part or part.strip().lower().endswith(_FILES):
        raise InvalidRequest(f"{shown(text)} is a path, not a package", hint=hint)


def _not_a_requirement(text: str, reason: str) -> InvalidRequest:
    if re.search(r"[^=<>!~]=[^=]", text.partition(";")[0]):
        return InvalidRequest(f"{shown(text)} is not a requirement", hint="an exact version is written with ==")
    told = reason.partition("\n")[0].rstrip(":. ")
    return InvalidRequest(f"{shown(text)} is not a requirement: {told[:1].lower()}{told[1:]}", hint=_PYTHON_HINT)
