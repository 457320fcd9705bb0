"""Packages on demand: tried beside the workspace, then put in its place, and written down in its own files.

An install that fails has changed nothing. One that is killed before it is decided leaves nothing either, and one that
is killed later is completed by `settle`, when the workspace is held again: from the decision on, the journal in the
manifest says what is to be put in place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from skep.errors import (
    Conflict,
    InvalidRequest,
    PackageRefused,
    SandboxDisabled,
    StorageFull,
    Unavailable,
    WorkspaceBusy,
    WorkspaceDamaged,
)
from skep.state.names import shown
from skep.workspace.faults import in_thread, whole
from skep.workspace.packages import declared
from skep.workspace.packages.decision import Decision, alone, carry_out, complete, require_settled
from skep.workspace.packages.provisioning import Outcome, Provisioning, Source
from skep.workspace.packages.trial import CHANGED, Trial, layers_of
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.installer import Journal
from skep.workspace.snapshot.package_cache import PackageCache
from skep.workspace.template.requirement import python_name
from skep.workspace.workspace import Workspace

Tell = Callable[[str], None]
Act = Callable[[Workspace, Mapping[str, Any]], Awaitable[dict[str, Any]]]


def _quiet(_: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What an install has changed: versions by name, and broken files by the names under which they are kept now."""

    python: Mapping[str, str] = field(default_factory=dict)
    node: Mapping[str, str] = field(default_factory=dict)
    aside: tuple[str, ...] = ()


async def install(
    workspace: Workspace,
    *,
    python: Sequence[str] = (),
    node: Sequence[str] = (),
    indexes: Indexes,
    cache: PackageCache,
    on_progress: Tell = _quiet,
) -> Installed:
    """Install packages into a workspace and declare them in its pyproject.toml and package.json.

    What runs in the workspace goes on. If it fails, nothing has changed: `PackageRefused` names the package and the
    reason, `StorageFull` says that there is no room, `Unavailable` that the package index does not answer.
    """
    _check(python, node)
    async with _provisioning(workspace, Source(indexes, cache, Journal(on_progress))) as provisioning:
        with _advised():
            outcome = await provisioning.install(python, node)
        on_progress("putting the packages in their place")
        await whole(_adopt(workspace, provisioning.trial, outcome))
    return Installed(outcome.python, outcome.node, tuple(outcome.aside.values()))


async def remove(
    workspace: Workspace,
    *,
    python: Sequence[str] = (),
    node: Sequence[str] = (),
    indexes: Indexes,
    cache: PackageCache,
    on_progress: Tell = _quiet,
) -> None:
    """Remove packages that were installed on demand. What they needed stays, and so does the template's own."""
    _check(python, node)
    async with _provisioning(workspace, Source(indexes, cache, Journal(on_progress))) as provisioning:
        names = [python_name(one) for one in python], [declared.node_name(one) for one in node]
        await whole(_adopt(workspace, provisioning.trial, await provisioning.remove(*names)))


async def settle(workspace: Workspace) -> None:
    """Complete or undo an install that was killed. Call it when a workspace has been taken hold of.

    If it cannot be completed now the workspace can be used all the same, and an examination tells of it.
    """
    trial = Trial.of(workspace)
    if workspace.manifest.installing is not None and not workspace.manifest.suspended:
        with suppress(StorageFull, WorkspaceDamaged, Unavailable, SandboxDisabled):
            await whole(_complete(workspace))
    if workspace.manifest.installing is None and trial.folder.exists():
        await in_thread(trial.end)


async def _complete(workspace: Workspace) -> None:
    async with alone(workspace):
        await complete(workspace)


def acts(indexes: Indexes, cache: PackageCache) -> dict[str, Act]:
    """Return what a holder does when another process asks for packages; see `Workspaces`."""

    async def do_install(workspace: Workspace, asked: Mapping[str, Any]) -> dict[str, Any]:
        python, node = _lists(asked)
        done = await install(workspace, python=python, node=node, indexes=indexes, cache=cache)
        return {"python": dict(done.python), "node": dict(done.node), "aside": list(done.aside)}

    async def do_remove(workspace: Workspace, asked: Mapping[str, Any]) -> dict[str, Any]:
        python, node = _lists(asked)
        await remove(workspace, python=python, node=node, indexes=indexes, cache=cache)
        return {}

    return {"install": do_install, "uninstall": do_remove}


def _lists(asked: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    python, node = ([str(package) for package in asked.get(kind) or ()] for kind in ("python", "node"))
    return python, node


def _check(python: Sequence[str], node: Sequence[str]) -> None:
    names = [*(("python", python_name(one)) for one in python), *(("node", declared.node_name(one)) for one in node)]
    if not names:
        raise InvalidRequest("no package is named", hint="name one, such as requests or axios")
    if twice := [name for place, (kind, name) in enumerate(names) if (kind, name) in names[:place]]:
        raise InvalidRequest(f"{shown(twice[0])} is asked for twice", hint="name each package once")


@contextmanager
def _advised() -> Iterator[None]:
    """Say what to do about a package that cannot be had, to somebody who has asked for it here and now."""
    try:
        yield
    except PackageRefused as error:
        error.hint = "nothing was changed; ask for another version, or another package"
        raise


@asynccontextmanager
async def _provisioning(workspace: Workspace, source: Source) -> AsyncIterator[Provisioning]:
    manifest = workspace.manifest
    if manifest.suspended:
        raise Conflict(f"workspace {manifest.id} is suspended", hint=f"skep workspace resume {manifest.id}")
    require_settled(workspace)
    async with alone(workspace):
        await workspace.come_home()
    trial, begun = Trial.of(workspace), False

    def begin() -> None:
        nonlocal begun
        trial.begin()
        begun = True

    try:
        await in_thread(begin)
        workspace.grounds.on_phase("trial")
        provisioning = Provisioning(workspace, trial, source)
        await provisioning.look()
        yield provisioning
    finally:
        if begun and workspace.manifest.installing is None:  # else it is needed to complete what was decided
            await in_thread(trial.end)


async def _adopt(workspace: Workspace, trial: Trial, outcome: Outcome) -> None:
    """Put what a trial has led to in its place."""
    decision = Decision(packages=outcome.packages, names=(*CHANGED, *outcome.aside.values()))
    async with alone(workspace):
        if layers_of(workspace)[-len(trial.older) :] != trial.older:
            raise WorkspaceBusy(f"workspace {workspace.id} was rolled back meanwhile", hint="install again")
        await carry_out(workspace, decision)
