"""From the moment on which it is decided, what a trial has led to gets its place, if need be after a crash.

The decision is written to the manifest first. Whoever takes hold of the workspace and finds it there does what is left
to do; when all is in its place, one write of the manifest takes the decision away and tells what is installed.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from skep.errors import StorageFull, WorkspaceDamaged
from skep.sandbox.sandbox import Sandbox
from skep.workspace.faults import explained, in_thread
from skep.workspace.manifest import Packages, damaged
from skep.workspace.packages.provisioning import snapshot_of
from skep.workspace.packages.transplant import STAGE, sweep, transplant
from skep.workspace.packages.trial import Trial, layers_of, room_in
from skep.workspace.workspace import Workspace


class Decision(BaseModel):
    """What is to be put in place: some names, as the trial shows them over the workspace or over its snapshot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    packages: Packages
    names: tuple[str, ...]
    over: Literal["workspace", "snapshot"] = "workspace"


@asynccontextmanager
async def alone(workspace: Workspace) -> AsyncIterator[None]:
    """Keep everybody else from keeping the state of a workspace, or returning to another."""
    async with workspace._turn:
        yield


def require_settled(workspace: Workspace) -> None:
    """Raise `WorkspaceDamaged` if what was decided earlier is not in its place yet."""
    if workspace.manifest.installing is not None:
        raise WorkspaceDamaged(
            f"an earlier install into workspace {workspace.id} was cut short and could not be completed",
            hint=f"skep workspace health {workspace.id} says what is in the way",
        )


async def carry_out(workspace: Workspace, decision: Decision) -> None:
    """Decide, and put everything in its place. Only for who is `alone`.

    If there is no room nothing has changed.
    """
    await workspace.save(workspace.manifest.changed(installing=decision.model_dump(mode="json")))
    workspace.grounds.on_phase("decided")
    await complete(workspace)


async def complete(workspace: Workspace) -> None:
    """Do what is left of what was decided. Only for who is `alone`."""
    decision = _decision(workspace)
    if decision.over == "snapshot" and await workspace.live() is None:
        await in_thread(_shed, workspace, decision.names)
        workspace.grounds.on_phase("shed")
    sandbox = await workspace.live() or await workspace._start()
    await sweep(sandbox, [entry.name for entry in await sandbox.files.list() if entry.name.startswith(STAGE)])
    try:
        placed = await _place(workspace, sandbox, decision)
    except StorageFull:
        await workspace.save(workspace.manifest.changed(installing=None))
        raise
    packages = decision.packages if placed else workspace.manifest.packages
    await workspace.save(workspace.manifest.changed(packages=packages, installing=None))
    workspace.grounds.on_phase("recorded")


async def _place(workspace: Workspace, sandbox: Sandbox, decision: Decision) -> bool:
    older = layers_of(workspace)
    trial = Trial.of(workspace, older if decision.over == "workspace" else snapshot_layers(workspace))
    if not trial.tree.is_dir():
        return False  # somebody has removed it: an examination tells what is missing now
    room = await in_thread(room_in, workspace)
    phase = workspace.grounds.on_phase
    await transplant(sandbox, trial.newer, older, decision.names, room=room, on_phase=phase)
    return True


def _decision(workspace: Workspace) -> Decision:
    try:
        return Decision.model_validate(workspace.manifest.installing)
    except ValidationError as error:
        raise damaged(str(workspace.folder), "has a decision in its manifest that cannot be read") from error


def snapshot_layers(workspace: Workspace) -> tuple[str, ...]:
    """Return the lowest layer of a workspace, which nobody can have damaged; none if there is none."""
    snapshot = snapshot_of(workspace)
    return (str(snapshot.tree),) if snapshot else ()


def _shed(workspace: Workspace, names: Iterable[str]) -> None:
    """Take what the workspace itself has of some names away, so that the snapshot shows there again.

    Only while no sandbox runs over it. It goes with the trial.
    """
    if workspace.grounds.layering == "copy":
        return
    bin = Trial.of(workspace).folder / f"shed-{secrets.token_hex(4)}"
    upper = workspace.grounds.stack(workspace.manifest).upper
    with explained(upper):
        bin.mkdir(mode=0o700)
        top = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in names:
                with suppress(FileNotFoundError):
                    _open_up(top, name)
                    os.rename(name, bin / name, src_dir_fd=top)
        finally:
            os.close(top)


def _open_up(top: int, name: str) -> None:
    """Let a folder be moved: its owner has to be allowed to write to it."""
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        mode = os.fstat(place).st_mode
        if stat.S_ISDIR(mode):
            Path(f"/proc/self/fd/{place}").chmod(stat.S_IMODE(mode) | 0o700)
    finally:
        os.close(place)
