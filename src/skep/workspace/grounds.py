"""What all workspaces of one home stand on: where things are, and how they are put together."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from skep.errors import NotFound, StorageFull, WorkspaceDamaged
from skep.sandbox.claim import Owner
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.stack import Stack
from skep.workspace.holding import referring
from skep.workspace.layers.copying import Copying, Index, flush
from skep.workspace.layers.trees import Note, Trees
from skep.workspace.manifest import Manifest, State, put
from skep.workspace.snapshot.snapshot import Snapshot

if TYPE_CHECKING:
    from skep.workspace.snapshot.snapshots import Snapshots

Layering = Literal["overlay", "copy"]
Phase = Callable[[str], None]

#: A workspace that has used up its quota can still clean up.
_LEAST_BYTES = 16 * MIB
_LEAST_INODES = 1000
#: The folders that every workspace has, whatever its template.
LAYOUT = ("hive", "attachments", "output", "output/display")
LOCK = ".lock"
_INDEX = "copied.json"


@dataclass(frozen=True, slots=True)
class Grounds:
    """The trees and snapshots of a home, and how its workspaces are made of them."""

    home: Path
    trees: Trees
    snapshots: Snapshots
    limits: Limits
    layering: Layering
    #: Told of each step as it is done, by the step's name.
    on_phase: Phase

    @property
    def folder(self) -> Path:
        return self.home / "workspaces"

    def referring(self) -> AbstractAsyncContextManager[None]:
        """Keep trees from being collected while references to them are made."""
        return referring(self.folder / LOCK)

    def layers(self, state: State, template: str) -> list[str]:
        """Return the folders that hold a state, the uppermost first."""
        found = [str(self.trees.tree(tree_id)) for tree_id in state.layers]
        if state.based and state.snapshot_version is not None:
            found.append(str(self.snapshot(template, state.snapshot_version).tree))
        return found

    def snapshot(self, template: str, version: str) -> Snapshot:
        """Return a snapshot that a workspace stands on; `WorkspaceDamaged` if it is missing."""
        try:
            return self.snapshots.get(template, version)
        except NotFound as error:
            raise WorkspaceDamaged(
                f"the snapshot {template} {version}, which lies below the workspace, is missing",
                hint=f"skep template build {template}, then skep workspace repair",
            ) from error

    def stack(self, manifest: Manifest) -> Stack:
        """Return what a sandbox over a workspace mounts."""
        below = self.layers(manifest.below, manifest.template)
        return Stack(str(self.trees.tree(manifest.upper)), str(self.trees.work(manifest.upper)), tuple(below))

    def limits_for(self, manifest: Manifest) -> Limits:
        """Return the limits of a sandbox: what sealed trees take of the quota is not there to be written."""
        taken = self.trees.weigh(manifest.sealed())
        return replace(
            self.limits,
            disk_bytes=max(self.limits.disk_bytes - taken.size, _LEAST_BYTES),
            inodes=max(self.limits.inodes - taken.inodes, _LEAST_INODES),
        )

    def next_upper(self, manifest: Manifest, below: Sequence[str]) -> str:
        """Make an empty tree for a workspace to write above others, of the same user as the one that it has."""

        def fill(target: Path, _: Owner | None) -> None:
            resemble(target, below)

        return self.trees.new(birth=manifest.birth, owner=self.trees.owner(manifest.upper), fill=fill)

    def copy(self, manifest: Manifest, layers: Sequence[str]) -> str:
        """Copy what some layers show, with nothing below, into a new tree that the workspace may write."""

        def fill(target: Path, owner: Owner | None) -> None:
            Copying(target, owner).run(layers, over=())
            flush(target)

        return self.trees.new(birth=manifest.birth, owner=self.trees.owner(manifest.upper), fill=fill)

    def copy_upper(self, manifest: Manifest) -> str:
        """Copy the tree that a workspace writes, marks and all, into a sealed one.

        What has not changed since the last such copy is shared with that one.
        """
        index = self.trees.beside(manifest.upper, _INDEX)
        made: list[Copying] = []

        def fill(target: Path, owner: Owner | None) -> Note:
            copying = Copying(target, owner, earlier=Index.read(index))
            made.append(copying.run([str(self.trees.tree(manifest.upper))]))
            flush(target)
            return Note(shared={Path(tree).parent.name: size for tree, size in copying.shared.items()})

        tree_id = self.trees.new(birth=manifest.birth, owner=self.trees.owner(manifest.upper), fill=fill)
        with suppress(StorageFull):  # then the next copy shares nothing with this one
            put(index, Index(self.trees.tree(tree_id), made[0].seen).dump(), lasting=False)
        return tree_id

    def merge(self, manifest: Manifest, layers: Sequence[str]) -> str:
        """Join sealed trees into one, sharing their files where they belong to the user of the workspace."""
        owner = self.trees.owner(manifest.upper)
        folders = {str(self.trees.tree(tree_id)): tree_id for tree_id in layers}
        own = {folder for folder, tree_id in folders.items() if self.trees.owner(tree_id) == owner}

        def fill(target: Path, owner: Owner | None) -> Note:
            copying = Copying(target, owner, linkable=own.__contains__).run(list(folders))
            flush(target)
            return Note(shared={folders[folder]: size for folder, size in copying.shared.items()})

        return self.trees.new(birth=manifest.birth, owner=owner, fill=fill)


def resemble(tree: Path, below: Sequence[str]) -> None:
    """Give an empty tree the mode of the one that it covers: a workspace has that of its uppermost."""
    if below:
        tree.chmod(stat.S_IMODE(Path(below[0]).stat().st_mode))


def lay_out(tree: Path, owner: Owner | None) -> None:
    """Make the folders that every workspace has. What is there already stays; a link is never followed."""
    top = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for path in LAYOUT:
            above, _, name = path.rpartition("/")
            with suppress(FileExistsError, NotADirectoryError, FileNotFoundError):
                _make(top, above, name, owner)
    finally:
        os.close(top)


def _make(top: int, above: str, name: str, owner: Owner | None) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(above or ".", flags, dir_fd=top)
    except OSError:
        return  # a link, or shut
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
        made = os.open(name, flags, dir_fd=folder)
        try:
            if owner is not None:
                os.fchown(made, *owner)
            os.fchmod(made, stat.S_IRWXU | 0o055)
        finally:
            os.close(made)
    finally:
        os.close(folder)
