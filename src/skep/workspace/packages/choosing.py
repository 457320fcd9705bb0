"""Choose versions for an environment that has packages already: they keep theirs unless that cannot be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skep.errors import InvalidRequest, PackageRefused
from skep.workspace.manifest import Packages
from skep.workspace.packages.declared import (
    PACKAGE_JSON,
    PYPROJECT,
    node_name,
    node_request,
    read_package_json,
    read_pyproject,
)
from skep.workspace.packages.environment import Environment
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.installer import Journal
from skep.workspace.snapshot.package_cache import PackageCache, fetch
from skep.workspace.snapshot.resolution import Artifact, Resolution
from skep.workspace.snapshot.toolchain import NODE_PACKAGE, Node
from skep.workspace.template.requirement import python_name

_NPM = (Path("/usr/bin/npm"), Path("/usr/local/bin/npm"))


@dataclass(frozen=True, slots=True)
class Choosing:
    """Where packages come from, and what the workspace has of them."""

    cache: PackageCache
    indexes: Indexes
    journal: Journal
    present: Environment
    #: The files in which the workspace declares its packages; one that is broken is left out.
    files: dict[str, bytes]
    #: What was installed on demand before.
    before: Packages = field(default_factory=Packages)
    #: The version of Node that the snapshot was built with.
    node_version: str | None = None

    async def python(self, asked: Sequence[str]) -> tuple[Artifact, ...]:
        """Choose what has to be installed for the packages asked for, and bring it into the cache."""
        version = self.present.python_version
        if version is None:
            raise InvalidRequest(
                "there is no environment of Python in this workspace",
                hint="`skep workspace repair` brings back one that was removed; else use a template that has `python`",
            )
        names = {python_name(package) for package in asked}
        kept = [f"{name}=={have}" for name, have in self.present.python.items() if name not in names]
        declared = (*read_pyproject(self.files.get(PYPROJECT, b"")), *self.before.python)
        loose = [package for package in dict.fromkeys(declared) if python_name(package) not in names]
        chosen = await self._fetched(
            lambda others: fetch(
                self.cache,
                self.indexes,
                python=[*asked, *others],
                interpreter=version,
                journal=self.journal,
                needed=lambda chosen: bool(self._missing(chosen)),
            ),
            kept,
            loose,
        )
        return self._missing(chosen)

    def _missing(self, chosen: Resolution) -> tuple[Artifact, ...]:
        return tuple(one for one in chosen.python if self.present.python.get(one.name) != one.version)

    async def node(self, asked: Sequence[str]) -> Node:
        """Bring what npm will want for the packages asked for into the cache, and say which npm that is."""
        npm = self.npm()
        names = {node_name(package) for package in asked}
        declared = read_package_json(self.files.get(PACKAGE_JSON, b"{}"))
        ranges = {name: wanted for name, wanted in declared.items() if name not in names}
        kept = [node_request(name, version) for name, version in self.present.node(ranges).items()]
        loose = [node_request(name, wanted) for name, wanted in ranges.items()]
        await self._fetched(
            lambda others: fetch(self.cache, self.indexes, node=[*asked, *others], npm=npm, journal=self.journal),
            kept,
            loose,
        )
        return npm

    async def _fetched(
        self, ask: Callable[[list[str]], Awaitable[Resolution]], kept: list[str], loose: list[str]
    ) -> Resolution:
        """Ask with everything else as it is; if that cannot be, with everything else as it was declared."""
        try:
            return await ask(kept)
        except PackageRefused:
            if not kept:
                raise
        return await ask(loose)

    def npm(self) -> Node:
        """Find the npm that serves the workspace."""
        if self.present.has_own_node and self.node_version:
            return Node(self.node_version, f"{NODE_PACKAGE}=={self.node_version}")
        if not any(path.exists() for path in _NPM):
            raise InvalidRequest(
                "there is no Node in this workspace, and no npm on this machine",
                hint="use a template that has `nodejs`, or install npm below /usr",
            )
        return Node(None)
