"""Rebuild what is broken in a workspace from its snapshot and its manifest, and touch nothing else.

Of the agent's own files none is read, changed or removed; a broken pyproject.toml or package.json is kept under another
name. Environments are rebuilt beside the workspace first: if that fails, they are left as they are.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from skep.errors import PackageRefused, SkepError, WorkspaceDamaged
from skep.workspace import manifest as manifests
from skep.workspace.faults import explained, in_thread, whole
from skep.workspace.grounds import LAYOUT
from skep.workspace.health.finding import Finding
from skep.workspace.health.health import examine
from skep.workspace.health.modules import at_odds
from skep.workspace.holding import Holding
from skep.workspace.manifest import MARK, NAME
from skep.workspace.packages import declared
from skep.workspace.packages.decision import Decision, alone, carry_out, require_settled, snapshot_layers
from skep.workspace.packages.declared import PACKAGE_JSON, PACKAGE_LOCK, PYPROJECT, node_request
from skep.workspace.packages.environment import Environment
from skep.workspace.packages.provisioning import Provisioning, Source, free_name, restored, snapshot_of
from skep.workspace.packages.trial import MODULES, PYTHON_HOME, Trial, layers_of
from skep.workspace.packages.view import View
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.installer import Journal
from skep.workspace.snapshot.package_cache import PackageCache
from skep.workspace.template.requirement import node_package, python_name, python_requirement
from skep.workspace.workspace import Workspace
from skep.workspace.workspaces import Workspaces

_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _quiet(_: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was done, and what is still not well."""

    done: tuple[str, ...]
    left: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.severity != "broken" for finding in self.left)


async def repair(
    workspaces: Workspaces,
    workspace_id: str,
    *,
    indexes: Indexes,
    cache: PackageCache,
    on_progress: Callable[[str], None] = _quiet,
) -> Repaired:
    """Put right what an examination finds, as far as the snapshot and the manifest tell how it should be.

    The workspace has to be free: one that another process holds is `WorkspaceBusy`.
    """
    done = await in_thread(_stand_up, workspaces, workspace_id)
    report = await examine(workspaces, workspace_id)
    left: list[Finding] = []
    if report.troubles and any(finding.code == "layers" and finding.severity == "ok" for finding in report.findings):
        async with workspaces.hold(workspace_id) as workspace:
            work = _Repair(workspace, Source(indexes, cache, Journal(on_progress)), done, left)
            await work.run({finding.code for finding in report.troubles})
        report = await examine(workspaces, workspace_id)
    return Repaired(tuple(done), (*left, *report.troubles))


def _stand_up(workspaces: Workspaces, workspace_id: str) -> list[str]:
    """Give a workspace its folder, manifest and mark back."""
    register = workspaces.register
    folder = register.path(workspace_id)
    condition = register.condition(workspace_id)
    try:
        manifests.read(folder)
    except WorkspaceDamaged:
        if condition == "plain" or workspace_id not in workspaces.lost():
            return []
        if (folder / NAME).exists():
            # Copied and not moved: a folder without a manifest could be taken for something else.
            shutil.copyfile(folder / NAME, folder / free_name((path.name for path in folder.iterdir()), NAME))
        workspaces.recover(workspace_id)
        return ["wrote the manifest again from the copy beside the files"]
    if condition not in ("half-made", "unmarked") or not manifests.read(folder).trees() <= workspaces.trees.all():
        return []  # one that was never finished holds nothing
    holding = Holding.take(folder)
    try:
        manifests.mark(folder)
    finally:
        holding.close()
    return [f"wrote {MARK} again"]


@dataclass(slots=True)
class _Repair:
    """One repair of a workspace that is held and in which nothing runs."""

    workspace: Workspace
    source: Source
    done: list[str] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)

    async def run(self, codes: Collection[str]) -> None:
        require_settled(self.workspace)
        await self.workspace.stop()
        if {"owners", "modes"} & {*codes}:
            await in_thread(self._hand_over)
            self.done.append("gave files back to the user of the workspace")
        if "declared" in codes:
            with self._told("the files that declare packages cannot be written"):
                await self._write_files()
        if {"python", "packages"} & {*codes}:
            with self._told(f"{PYTHON_HOME} cannot be rebuilt"):
                await self._rebuild(PYTHON_HOME)
        if "modules" in codes:
            with self._told(f"{MODULES} cannot be rebuilt"):
                await self._rebuild(MODULES)
        if "layout" in codes:
            with self._told("the usual folders cannot be made"):
                await self._lay_out()

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Note what cannot be done, and go on with the rest."""
        try:
            yield
        except SkepError as error:
            self.left.append(Finding("repair", "broken", f"{what}: {error.message}", error.hint))

    async def _lay_out(self) -> None:
        sandbox = await self.workspace.sandbox()
        for path in LAYOUT:
            await sandbox.files.mkdir(path)
        self.done.append("made the usual folders again")

    def _hand_over(self) -> None:
        """Make everything in the tree that is written its owner's, and open the folders that have to be open."""
        upper = self.workspace.grounds.stack(self.workspace.manifest).upper
        with explained(upper):
            if os.geteuid() == 0:
                _chown(upper)
            _open_up(upper, ".", 0o700)
            for path in (PYTHON_HOME, MODULES, *LAYOUT):
                with suppress(FileNotFoundError, NotADirectoryError):
                    _open_up(upper, path, 0o755)

    async def _write_files(self) -> None:
        """Write pyproject.toml and its like again where they are broken or gone."""
        view = View(layers_of(self.workspace))
        snapshot, packages = snapshot_of(self.workspace), self.workspace.manifest.packages
        sandbox = await self.workspace.sandbox()
        for file in (PYPROJECT, PACKAGE_JSON, PACKAGE_LOCK):
            text = await in_thread(view.read, file)
            anew = await in_thread(restored, file, snapshot, packages)
            if declared.fault(file, text) is not None:
                name = free_name(await in_thread(view.names), file)
                await sandbox.files.move(file, name)
                self.done.append(f"kept the broken {file} as {name}")
            elif text is not None or snapshot is None or not (snapshot.tree / file).exists():
                continue
            if anew is not None:
                await sandbox.files.write(file, anew)
                self.done.append(f"wrote {file} again")

    async def _rebuild(self, name: str) -> None:
        """Build an environment anew beside the workspace, and put it in its place if that works."""
        await self.workspace.stop()
        trial = Trial.of(self.workspace, snapshot_layers(self.workspace))
        try:
            await self._fill(trial, name)
            packages = self.workspace.manifest.packages
            await whole(self._put(Decision(packages=packages, names=(name,), over="snapshot")))
            self.done.append(f"rebuilt {name} from the snapshot")
        finally:
            if self.workspace.manifest.installing is None:
                await in_thread(trial.end)

    async def _fill(self, trial: Trial, name: str) -> None:
        everything, on_demand = await in_thread(self._wanted, name)
        try:
            await self._try(trial, name, everything)
        except PackageRefused as error:
            if everything == on_demand:
                raise
            # What the agent has declared by hand may be anything.
            self.left.append(Finding("repair", "warning", error.message, "correct what is declared"))
            await in_thread(trial.end)
            await self._try(trial, name, on_demand)

    async def _try(self, trial: Trial, name: str, packages: list[str]) -> None:
        await in_thread(trial.begin)
        provisioning = Provisioning(self.workspace, trial, self.source)
        await provisioning.look()
        await provisioning.install(*((packages, ()) if name == PYTHON_HOME else ((), packages)))
        if await in_thread(View(trial.newer).find, name) is None:
            raise WorkspaceDamaged(
                f"workspace {self.workspace.id} has no snapshot that holds it", hint="restore it from an archive"
            )

    def _wanted(self, name: str) -> tuple[list[str], list[str]]:
        """Return the packages that the snapshot does not have: all that are declared, and those that were installed."""
        view, base = View(layers_of(self.workspace)), Environment.read(snapshot_layers(self.workspace))
        packages = self.workspace.manifest.packages
        if name == PYTHON_HOME:
            listed = declared.joined(_listed_python(view), add=packages.python, name=python_name)
            return [one for one in listed if not _met(one, base)], [
                one for one in packages.python if not _met(one, base)
            ]
        ranges = _listed_node(view)
        asked = {package.name: package.wanted for package in map(node_package, packages.node)}
        return _lacking_node({**ranges, **asked}, base), _lacking_node(asked, base)

    async def _put(self, decision: Decision) -> None:
        async with alone(self.workspace):
            await carry_out(self.workspace, decision)


def _open_up(upper: str, path: str, mode: int) -> None:
    """Let a folder's own user use it. A link in its place, or on the way to it, is left alone."""
    place = os.open(upper, _PLACE)
    try:
        for part in path.split("/"):
            below = os.open(part, _PLACE, dir_fd=place)
            os.close(place)
            place = below
        found = os.fstat(place).st_mode
        if found & 0o700 != 0o700:
            Path(f"/proc/self/fd/{place}").chmod(stat.S_IMODE(found) | mode)
    finally:
        os.close(place)


def _chown(upper: str) -> None:
    owner = Path(upper).stat()
    for _, folders, files, at in os.fwalk(upper, follow_symlinks=False):
        for name in (*folders, *files):
            if os.stat(name, dir_fd=at, follow_symlinks=False).st_uid != owner.st_uid:
                os.chown(name, owner.st_uid, owner.st_gid, dir_fd=at, follow_symlinks=False)


def _listed_python(view: View) -> tuple[str, ...]:
    try:
        return declared.read_pyproject(view.read(PYPROJECT) or b"")
    except declared.Broken:
        return ()


def _listed_node(view: View) -> dict[str, str]:
    try:
        return declared.read_package_json(view.read(PACKAGE_JSON) or b"{}")
    except declared.Broken:
        return {}


def _met(requirement: str, base: Environment) -> bool:
    version = base.python.get(python_name(requirement))
    return version is not None and python_requirement(requirement).specifier.contains(version, prereleases=True)


def _lacking_node(wanted: dict[str, str], base: Environment) -> list[str]:
    have = base.node(wanted)
    wrong = at_odds({name: wish or "*" for name, wish in wanted.items()}, have)
    return [node_request(name, wish) for name, wish in wanted.items() if name not in have or name in wrong]
