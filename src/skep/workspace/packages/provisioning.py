"""Change the packages of a workspace in a trial: choose, fetch, install, and write down what was asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from skep.errors import InvalidRequest, SkepError, WorkspaceDamaged
from skep.sandbox.files import Files
from skep.state.names import shown
from skep.workspace.faults import in_thread
from skep.workspace.held import Held
from skep.workspace.manifest import Packages
from skep.workspace.packages import declared
from skep.workspace.packages.choosing import Choosing
from skep.workspace.packages.declared import PACKAGE_JSON, PACKAGE_LOCK, PYPROJECT
from skep.workspace.packages.environment import Environment
from skep.workspace.packages.trial import Tools, Trial, trying
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.installer import Journal
from skep.workspace.snapshot.package_cache import PackageCache
from skep.workspace.snapshot.resolution import Artifact
from skep.workspace.snapshot.snapshot import Snapshot
from skep.workspace.snapshot.toolchain import UV, Node
from skep.workspace.template.requirement import python_name, python_requirement

_VENV = "/workspace/.venv"


@dataclass(frozen=True, slots=True)
class Source:
    """Where packages come from, and who is told of each step."""

    indexes: Indexes
    cache: PackageCache
    journal: Journal = field(default_factory=Journal)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial has led to: versions that have changed, files put aside, and what is on demand from now on."""

    packages: Packages
    python: Mapping[str, str] = field(default_factory=dict)
    node: Mapping[str, str] = field(default_factory=dict)
    #: Broken files, and the names under which they are kept.
    aside: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Provisioning:
    """One change of packages in a trial, over the layers that the trial lies over."""

    held: Held
    trial: Trial
    source: Source
    present: Environment = field(init=False)
    files: dict[str, bytes] = field(default_factory=dict)
    aside: dict[str, str] = field(default_factory=dict)

    async def look(self) -> None:
        """Read what is installed and declared; a broken file is to be replaced."""
        self.present = await in_thread(Environment.read, self.trial.older)
        await in_thread(self._read_files)

    def _read_files(self) -> None:
        view, names = self.present.view, self.present.view.names()
        snapshot, packages = snapshot_of(self.held), self.held.manifest.packages
        for file in (PYPROJECT, PACKAGE_JSON, PACKAGE_LOCK):
            text = view.read(file)
            if declared.fault(file, text) is not None:
                self.aside[file] = free_name(names, file)
                text = restored(file, snapshot, packages)
            if text is not None:
                self.files[file] = text

    async def install(self, python: Sequence[str], node: Sequence[str]) -> Outcome:
        choosing = self._choosing()
        artifacts = await choosing.python(python) if python else ()
        npm = await choosing.node(node) if node else None
        self.held.grounds.on_phase("fetched")
        aside = self._involved(python, node)
        async with self._trying(network=any(artifact.needs_build for artifact in artifacts)) as tools:
            files = tools.installer.sandbox.files
            await self._put_aside(files, aside)
            await self._install_python(tools, artifacts)
            if npm is not None:
                await self._run_npm(tools, npm, "install", node)
            after = await in_thread(Environment.read, self.trial.newer)
            recorded = await self._record(files, after, python, node)
        self.held.grounds.on_phase("tried")
        names = [declared.node_name(package) for package in node]
        was, now = self.present.node(names), after.node(names)
        changed = {name: version for name, version in now.items() if was.get(name) != version}
        versions = {artifact.name: artifact.version for artifact in artifacts}
        return Outcome(recorded, versions, changed, aside)

    async def remove(self, python: Collection[str], node: Collection[str]) -> Outcome:
        self._require_on_demand(python, node)
        async with self._trying(network=False) as tools:
            if python:
                words = [UV, "pip", "uninstall", "--python", _VENV, *python]
                await tools.installer.run(words, doing="removing Python packages")
                text = declared.edit_pyproject(self.files.get(PYPROJECT), drop=python)
                await tools.installer.sandbox.files.write(PYPROJECT, text)
            if node:
                await self._run_npm(tools, self._choosing().npm(), "uninstall", list(node))
        self.held.grounds.on_phase("tried")
        before = self.held.manifest.packages
        left = Packages(
            python=declared.joined(before.python, drop=python, name=python_name),
            node=declared.joined(before.node, drop=node, name=declared.node_name),
        )
        return Outcome(left)

    def _require_on_demand(self, python: Collection[str], node: Collection[str]) -> None:
        packages = self.held.manifest.packages
        there = {*map(python_name, packages.python)}, {*map(declared.node_name, packages.node)}
        for asked, known in zip((python, node), there, strict=True):
            for name in asked:
                if name not in known:
                    raise InvalidRequest(
                        f"{shown(name)} was not installed into workspace {self.held.id}",
                        hint=f"only what was installed can be removed: {', '.join(sorted(known)) or 'nothing was'}",
                    )

    def _choosing(self) -> Choosing:
        snapshot = snapshot_of(self.held)
        return Choosing(
            self.source.cache,
            self.source.indexes,
            self.source.journal,
            self.present,
            self.files,
            self.held.manifest.packages,
            snapshot.node if snapshot else None,
        )

    @asynccontextmanager
    async def _trying(self, *, network: bool) -> AsyncIterator[Tools]:
        source = self.source
        async with trying(
            self.trial, self.held, cache=source.cache, indexes=source.indexes, journal=source.journal, network=network
        ) as tools:
            yield tools

    def _involved(self, python: Sequence[str], node: Sequence[str]) -> dict[str, str]:
        """Return the broken files that this install has to do with."""
        mine = {PYPROJECT: bool(python), PACKAGE_JSON: bool(node), PACKAGE_LOCK: bool(node)}
        return {file: name for file, name in self.aside.items() if mine[file]}

    async def _put_aside(self, files: Files, aside: Mapping[str, str]) -> None:
        for file, name in aside.items():
            await files.move(file, name)
            if file in self.files:
                await files.write(file, self.files[file])

    async def _install_python(self, tools: Tools, artifacts: Sequence[Artifact]) -> None:
        if artifacts:
            self.source.journal.tell(f"installing {_count(artifacts, 'Python package')}")
            await tools.installer.install_python(artifacts, _VENV, flags=["--compile-bytecode"])

    async def _run_npm(self, tools: Tools, npm: Node, verb: str, words: Sequence[str]) -> None:
        self.source.journal.tell(f"{verb}ing {_count(words, 'Node package')}")
        flags = [*self.source.indexes.node_flags(), "--offline" if tools.offline else "--prefer-offline"]
        await tools.installer.run(
            [*npm.npm, verb, *flags, *words], doing=f"{verb}ing Node packages", env=npm.environment
        )

    async def _record(self, files: Files, after: Environment, python: Sequence[str], node: Sequence[str]) -> Packages:
        """Declare what was asked for, with the versions that were chosen where none was named."""
        before = self.held.manifest.packages
        asked = [_pinned_below(package, after.python) for package in python]
        if asked:
            # Packages have run code since it was read: what they made of the file is not taken over.
            await files.write(PYPROJECT, declared.edit_pyproject(self.files.get(PYPROJECT), add=asked))
        wanted = _npm_ranges(await in_thread(after.view.read, PACKAGE_JSON)) if node else {}
        named = [declared.node_name(package) for package in node]
        ranges = [
            declared.node_request(name, wanted[name]) if name in wanted else package
            for name, package in zip(named, node, strict=True)
        ]
        return Packages(
            python=declared.joined(before.python, add=asked, name=python_name),
            node=declared.joined(before.node, add=ranges, name=declared.node_name),
        )


def _npm_ranges(text: bytes | None) -> dict[str, str]:
    try:
        return declared.read_package_json(text or b"{}")
    except declared.Broken:  # a package's own script has broken it
        return {}


def _pinned_below(package: str, versions: Mapping[str, str]) -> str:
    """Write a requirement that names no version with the one that was chosen as the least."""
    found = python_requirement(package)
    version = versions.get(python_name(package))
    if version is not None and not found.specifier:
        found.specifier = SpecifierSet(f">={Version(version).public}")
    return str(found)


def _count(things: Collection[object], name: str) -> str:
    return f"1 {name}" if len(things) == 1 else f"{len(things)} {name}s"


def snapshot_of(held: Held) -> Snapshot | None:
    """Return the snapshot that a workspace began with, if it is still there."""
    version = held.manifest.snapshot_version
    try:
        return held.grounds.snapshot(held.manifest.template, version) if version else None
    except SkepError:
        return None


def restored(file: str, snapshot: Snapshot | None, packages: Packages) -> bytes | None:
    """Write one of the workspace's files anew, from that of the snapshot and what was installed since."""
    path = snapshot.tree / file if snapshot else None
    original = path.read_bytes() if path and path.is_file() else None
    return declared.restored(file, original, packages.python if file == PYPROJECT else packages.node)


def free_name(names: Iterable[str], file: str) -> str:
    """Return a name that is free for a broken file to be kept under."""
    taken = set(names)
    candidates = [f"{file}.broken", *(f"{file}.broken-{number}" for number in range(2, 1000))]
    for name in candidates:
        if name not in taken:
            return name
    raise WorkspaceDamaged(f"{file} has been broken 1,000 times", hint=f"remove some of {file}.broken-*")
