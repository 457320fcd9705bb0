"""What a workspace declares in its own files: pyproject.toml and package.json.

They belong to the agent, who may have changed or broken them. What is not understood in them is kept as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from skep.errors import InvalidRequest
from skep.workspace.template.requirement import node_package, python_name

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

PYPROJECT = "pyproject.toml"
PACKAGE_JSON = "package.json"
PACKAGE_LOCK = "package-lock.json"
#: The parts of package.json that name packages which are installed.
_SECTIONS = ("dependencies", "devDependencies", "optionalDependencies")


class Broken(ValueError):
    """A file of the workspace that cannot be read as what it should be."""


def read_pyproject(text: bytes) -> tuple[str, ...]:
    """Return the packages that a pyproject.toml declares, those that name one on the package index."""
    project = _document(text).get("project", {})
    found = project.get("dependencies", []) if isinstance(project, Mapping) else None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise Broken("it has a [project] in which dependencies is not a list of texts")
    return tuple(str(one) for one in found if _is_python(str(one)))


def edit_pyproject(text: bytes | None, *, add: Iterable[str] = (), drop: Iterable[str] = ()) -> bytes:
    """Return a pyproject.toml that declares more or fewer packages; all else in it stays as it is."""
    import tomlkit

    read_pyproject(text or b"")  # or it is broken
    document = _document(text or b"")
    if "project" not in document:
        project = tomlkit.table()
        project.update({"name": "workspace", "version": "0"})
        document["project"] = project
    table: Any = document["project"]
    if "dependencies" not in table:
        table["dependencies"] = tomlkit.array()
    listed: Any = table["dependencies"]
    coming = {python_name(one): one for one in add}
    gone = {canonicalize_name(name) for name in drop}
    for place in reversed(range(len(listed))):
        name = python_name(listed[place]) if _is_python(listed[place]) else None
        if name in coming:
            listed[place] = coming.pop(name)
        elif name in gone:
            del listed[place]
    for requirement in coming.values():
        listed.append(requirement)
    if len(listed):
        listed.multiline(True)
    return tomlkit.dumps(document).encode()


def read_package_json(text: bytes) -> dict[str, str]:
    """Return the packages that a package.json declares, with their ranges, those that name one of the registry."""
    found: dict[str, str] = {}
    content = _object(text)
    for section in _SECTIONS:
        named = content.get(section, {})
        if not isinstance(named, dict):
            raise Broken(f"it has {section} that do not map names to ranges")
        found.update({name: wanted for name, wanted in named.items() if _is_node(name, wanted)})
    return found


def edit_package_json(text: bytes | None, *, add: Mapping[str, str]) -> bytes:
    """Return a package.json that declares more packages; all else in it stays."""
    read_package_json(text or b"{}")  # or it is broken
    content: dict[str, Any] = _object(text) if text is not None else {"name": "workspace", "private": True}
    content["dependencies"] = {**content.get("dependencies", {}), **add}
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def node_name(package: str) -> str:
    return node_package(package).name


def node_request(name: str, wanted: str) -> str:
    """Write a package and its range as npm is asked for it."""
    return name if wanted in ("", "*") else f"{name}@{wanted}"


def joined(
    listed: Sequence[str], *, add: Iterable[str] = (), drop: Iterable[str] = (), name: Callable[[str], str]
) -> tuple[str, ...]:
    """Return a list of packages in which some have taken the place of those of the same name, and others are gone."""
    coming = {name(one): one for one in add}
    gone = set(drop)
    kept = [coming.pop(name(one), one) for one in listed if name(one) not in gone]
    return (*kept, *coming.values())


def _document(text: bytes) -> TOMLDocument:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        return tomlkit.parse(text.decode())
    except UnicodeDecodeError as error:
        raise Broken("it is not text") from error
    except TOMLKitError as error:
        raise Broken(f"it is half-written or not TOML: {error}") from error


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Broken(f"it is half-written or not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Broken("it is not an object")
    return found


def _is_python(text: str) -> bool:
    try:
        python_name(text)
    except InvalidRequest:
        return False
    return True


def _is_node(name: object, wanted: object) -> bool:
    if not isinstance(name, str) or not isinstance(wanted, str):
        return False
    try:
        node_package(node_request(name, wanted))
    except InvalidRequest:
        return False
    return True


def fault(file: str, text: bytes | None) -> str | None:
    """Say what is wrong with one of the files; a file that is not there is not wrong."""
    if text is None:
        return None
    try:
        _READERS[file](text)
    except Broken as error:
        return str(error)
    return None


def restored(file: str, original: bytes | None, packages: Iterable[str]) -> bytes | None:
    """Write one of the files anew, from that of the snapshot and what was installed since."""
    if file == PYPROJECT:
        return edit_pyproject(original, add=packages)
    if file == PACKAGE_JSON:
        named = map(node_package, packages)
        return edit_package_json(original, add={package.name: package.wanted or "*" for package in named})
    return original


_READERS: dict[str, Callable[[bytes], object]] = {
    PYPROJECT: read_pyproject,
    PACKAGE_JSON: read_package_json,
    PACKAGE_LOCK: _object,
}
