"""The things about a workspace that can be looked at, one by one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name

from skep.errors import NotFound, SkepError, WorkspaceDamaged
from skep.sandbox.limits import MIB
from skep.sandbox.sandbox import Sandbox
from skep.workspace import manifest as manifests
from skep.workspace.faults import in_thread
from skep.workspace.grounds import LAYOUT, Grounds
from skep.workspace.health.checkup import feel, imports, resolves
from skep.workspace.health.finding import Finding, Report, Severity
from skep.workspace.health.modules import at_odds, lacking
from skep.workspace.manifest import MARK, Manifest
from skep.workspace.packages import declared
from skep.workspace.packages.declared import PACKAGE_JSON, PACKAGE_LOCK, PYPROJECT
from skep.workspace.packages.environment import Environment
from skep.workspace.packages.trial import MODULES, PYTHON_HOME, count
from skep.workspace.snapshot.snapshot import Snapshot
from skep.workspace.template.requirement import node_package, python_name
from skep.workspace.workspaces import Workspaces

_NEARLY = 0.9
_LOW_BYTES = 200 << 20
_MANY = 5
_MOST_LOOKED_AT = 5000
ENVIRONMENTS = (PYTHON_HOME, MODULES)


@dataclass(slots=True)
class Examination:
    """One examination, and what it has found so far."""

    workspaces: Workspaces
    id: str
    findings: list[Finding] = field(default_factory=list)

    def note(self, code: str, severity: Severity, message: str, fix: str | None = None) -> None:
        self.findings.append(Finding(code, severity, message, fix))

    def broken(self, code: str, message: str) -> None:
        """Note what `repair` puts right."""
        self.note(code, "broken", message, self._command("repair"))

    def _command(self, verb: str) -> str:
        return f"skep workspace {verb} {self.id}"

    def report(self) -> Report:
        return Report(self.id, tuple(self.findings))

    def standing(self) -> Manifest | None:
        """Look at the workspace's own folder; None if there is nothing more to be looked at."""
        register = self.workspaces.register
        condition = register.condition(self.id)
        if condition == "missing":
            if self.id not in self.workspaces.lost():
                raise NotFound(f"there is no workspace {self.id}", hint="skep workspace list")
            self.broken("folder", "the folder of the workspace is gone; its files are there")
            return None
        if condition == "plain":
            self.note("folder", "ok", "a plain folder, which becomes a workspace when it is first used")
            return None
        try:
            found = manifests.read(register.path(self.id))
        except WorkspaceDamaged as error:
            if condition == "half-made":
                self.note("mark", "broken", "the workspace was never finished", self._command("create"))
            else:
                self.broken("manifest", error.message)
            return None
        if condition == "half-made" and not found.trees() <= self.workspaces.trees.all():
            self.note("mark", "broken", "the workspace was never finished", self._command("create"))
            return None
        if condition in ("half-made", "unmarked"):
            self.broken("mark", f"the mark of a finished workspace, {MARK}, is missing")
            return None
        self.note("manifest", "ok", f"the manifest is whole (generation {found.generation})")
        if found.installing is not None:
            self.note("install", "warning", "an install was cut short; the next use completes it")
        return found

    def ground(self, grounds: Grounds, manifest: Manifest) -> tuple[str, ...] | None:
        """Look at the folders that the workspace is made of; None if one is missing."""
        missing = [tree_id for tree_id in sorted(manifest.trees()) if not grounds.trees.tree(tree_id).is_dir()]
        for tree_id in missing:
            where = grounds.trees.tree(tree_id)
            self.note("layers", "broken", f"the folder {where} is missing", self._command("restore"))
        try:
            stack = grounds.stack(manifest)
        except SkepError as error:
            self.note("snapshot", "broken", f"its snapshot is missing: {error.message}", self._command("restore"))
            return None
        if missing:
            return None
        self.note("layers", "ok", f"all {len(manifest.trees())} folders and the snapshot are there")
        self._room(grounds, manifest)
        self._owners(stack.upper)
        return (stack.upper, *stack.layers)

    def _room(self, grounds: Grounds, manifest: Manifest) -> None:
        limits = grounds.limits_for(manifest)
        used = count(grounds.stack(manifest).upper)
        share = max(used.size / limits.disk_bytes, used.inodes / limits.inodes)
        told = f"{used.size / MIB:.1f} of {limits.disk_bytes / MIB:.0f} MB and {used.inodes} of {limits.inodes} files"
        if share >= 1:
            self.note("room", "broken", f"its room is used up: {told}", "remove files, or raise the template's disk_mb")
        elif share >= _NEARLY:
            self.note("room", "warning", f"its room is nearly used up: {told}", "remove what is not needed")
        else:
            self.note("room", "ok", told)
        disk = os.statvfs(grounds.home)
        if disk.f_bavail * disk.f_frsize < _LOW_BYTES or (disk.f_files and disk.f_favail < disk.f_files // 100):
            self.note("disk", "warning", f"the disk that holds {grounds.home} is nearly full", "free some space there")

    def _owners(self, upper: str) -> None:
        """Look for files that the sandbox's own user cannot change, as a person with root leaves them."""
        owner = Path(upper).stat().st_uid
        strange = [path for path, found in walk(upper) if found.st_uid != owner]
        shut = [
            path
            for path in ("", *ENVIRONMENTS, *LAYOUT)
            if (found := _look(f"{upper}/{path}")) and stat.S_ISDIR(found.st_mode) and found.st_mode & 0o700 != 0o700
        ]
        if strange:
            self.broken("owners", f"{_some(strange)} belong to another user than the workspace")
        if shut:
            self.broken("modes", f"{_some([path or '/workspace' for path in shut])} cannot be used by their own user")
        if not strange and not shut:
            self.note("owners", "ok", "everything belongs to the user of the workspace")

    def files(self, seen: Environment, manifest: Manifest, snapshot: Snapshot | None) -> None:
        """Look at what the workspace declares."""
        top = set(seen.view.names())
        for file in (PYPROJECT, PACKAGE_JSON, PACKAGE_LOCK):
            wrong = declared.fault(file, seen.view.read(file))
            if wrong is not None:
                self.broken("declared", f"{file} cannot be read: {wrong}")
            elif file not in top and snapshot is not None and (snapshot.tree / file).exists():
                self.note("declared", "warning", f"{file} was removed", self._command("repair"))
        lost = [path for path in LAYOUT if path != "hive" and seen.view.find(path) is None]
        if lost:
            self.note("layout", "warning", f"{_some(lost)} are missing", self._command("repair"))
        unsaid = _undeclared(seen, manifest)
        if unsaid:
            self.note(
                "record", "warning", f"{_some(unsaid)} were installed and are no longer declared",
                f"skep workspace install {self.id} {' '.join(unsaid)}",
            )  # fmt: skip

    async def python(
        self, sandbox: Sandbox, wanted: set[str], *, changed: set[str] | None = None, thorough: bool = False
    ) -> None:
        """Run the interpreter, and look at the packages that it should have, those that may have `changed`."""
        pulse = await feel(sandbox, wanted, changed)
        if pulse.version is None:
            self.broken("python", f"the interpreter in .venv does not run: {pulse.reason}")
            return
        self.note("python", "ok", f"Python {pulse.version} runs")
        damaged = dict(pulse.damaged)
        for name in sorted(wanted - damaged.keys()) if thorough else ():
            if (reason := await imports(sandbox, name)) is not None:
                damaged[name] = f"cannot be imported: {reason}"
        for name, what in sorted(damaged.items()):
            self.broken("packages", f"the Python package {name} {what}")
        if not damaged:
            self.note("packages", "ok", f"{len(wanted)} Python packages are whole")

    async def node(
        self,
        sandbox: Sandbox,
        seen: Environment,
        wanted: dict[str, str],
        *,
        changed: set[str] | None = None,
        thorough: bool = False,
    ) -> None:
        """Look whether the packages for JavaScript can be found."""
        if not wanted:
            return
        troubles = await in_thread(lacking, seen.view, wanted, deep=changed != set())
        if thorough:
            troubles = {**await resolves(sandbox, sorted(wanted.keys() - troubles.keys())), **troubles}
        for name, what in sorted(troubles.items()):
            self.broken("modules", f"the Node package {name} {what}")
        have = await in_thread(seen.node, [name for name in wanted if name not in troubles])
        for name, what in sorted(at_odds(wanted, have).items()):
            self.note(
                "modules",
                "warning",
                f"the Node package {name} {what}",
                f"skep workspace install {self.id} --node {name}",
            )
        if not troubles:
            self.note("modules", "ok", f"{len(wanted)} Node packages can be resolved")


def snapshot_below(grounds: Grounds, manifest: Manifest) -> Snapshot | None:
    """Return the snapshot that a workspace began with, if it is still there."""
    try:
        return grounds.snapshot(manifest.template, manifest.snapshot_version) if manifest.snapshot_version else None
    except SkepError:
        return None


def python_wanted(seen: Environment, manifest: Manifest, snapshot: Snapshot | None) -> set[str] | None:
    """Return the packages that Python should have; None if it is nothing to this workspace."""
    asked = (*_declared_python(seen), *manifest.packages.python)
    built = snapshot.python_packages if snapshot else {}
    if not asked and seen.python_version is None and (snapshot is None or snapshot.python is None):
        return None
    return {*map(python_name, asked), *map(canonicalize_name, built)}


def node_wanted(seen: Environment, manifest: Manifest, snapshot: Snapshot | None) -> dict[str, str]:
    """Return the packages that Node should find, with the ranges that are declared."""
    built = dict.fromkeys(snapshot.node_packages, "*") if snapshot else {}
    asked = {package.name: package.wanted or "*" for package in map(node_package, manifest.packages.node)}
    try:
        listed = declared.read_package_json(seen.view.read(PACKAGE_JSON) or b"{}")
    except declared.Broken:
        listed = {}
    return {**built, **asked, **listed}


def _declared_python(seen: Environment) -> tuple[str, ...]:
    try:
        return declared.read_pyproject(seen.view.read(PYPROJECT) or b"")
    except declared.Broken:
        return ()


def _undeclared(seen: Environment, manifest: Manifest) -> list[str]:
    """Return the packages that were installed on demand and that the workspace's files say nothing of any more."""
    python = {python_name(package) for package in _declared_python(seen)}
    gone = [name for package in manifest.packages.python if (name := python_name(package)) not in python]
    return gone if seen.view.find(PYPROJECT) is not None else []


def walk(upper: str, most: int = _MOST_LOOKED_AT) -> Iterator[tuple[str, os.stat_result]]:
    """Go through the first things in a folder, without following links."""
    for folder, folders, files, at in os.fwalk(upper, follow_symlinks=False):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                yield f"{folder}/{name}"[len(upper) + 1 :], os.stat(name, dir_fd=at, follow_symlinks=False)
            most -= 1
            if most <= 0:
                return


def _look(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - _MANY} more" if len(paths) > _MANY else ""
    return ", ".join(ascii(path[:100])[1:-1] for path in paths[:_MANY]) + more
