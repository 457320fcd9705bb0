"""What is on the disk: workspaces by their folders, and the trees that nobody needs any more.

A folder below `workspaces/` is a workspace once it has its mark. Without the mark it was never finished, unless it
holds something else altogether: then it is a workspace from before there were manifests, a plain folder of files.

A tree is removed when no workspace needs it and it is known why: a workspace that is there has let go of it or never
got to use it, or a workspace that needed it was destroyed. A tree whose workspace has vanished otherwise is kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from skep.errors import NotFound, SkepError, WorkspaceBusy, WorkspaceDamaged
from skep.sandbox.erase import erase
from skep.workspace import manifest as manifests
from skep.workspace.faults import explained
from skep.workspace.holding import Holding
from skep.workspace.layers.trees import NOBODY, Trees
from skep.workspace.manifest import DRAFT, MARK, NAME, Manifest, check_id

_GONE = ".gone-"
_OWN = (NAME, MARK, "lock", "door", "door.new")

Condition = Literal["missing", "half-made", "unmarked", "plain", "ready"]


@dataclass(slots=True)
class Census:
    """What was found: manifests by id, and why others cannot be read."""

    manifests: dict[str, Manifest] = field(default_factory=dict)
    damaged: dict[str, WorkspaceDamaged] = field(default_factory=dict)
    #: Half-made ones, by id, and plain folders.
    half_made: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)


class Register:
    """The workspaces of one home."""

    def __init__(self, folder: Path, trees: Trees) -> None:
        self.folder = folder
        self._trees = trees

    def path(self, workspace_id: str) -> Path:
        return self.folder / check_id(workspace_id)

    def condition(self, workspace_id: str) -> Condition:
        """Say what is in the folder of a workspace."""
        folder = self.path(workspace_id)
        try:
            names = {path.name for path in folder.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
        if MARK in names:
            return "ready"
        strange = {name for name in names if name not in _OWN and not name.startswith(DRAFT)}
        if NAME in names:
            return "unmarked" if self._was_finished(folder) else "half-made"
        return "plain" if strange else "half-made"

    def _was_finished(self, folder: Path) -> bool:
        """Say whether a workspace without its mark had one: then there may be files of an agent's in it."""
        try:
            found = manifests.read(folder)
        except WorkspaceDamaged:
            return False
        return self._trees.beside(found.upper, MARK).exists()

    def show(self, workspace_id: str) -> Manifest:
        """Read the manifest of a workspace that is ready."""
        self.need(workspace_id)
        return manifests.read(self.path(workspace_id))

    def need(self, workspace_id: str) -> None:
        """Raise what is to be said of a workspace that is not ready."""
        match self.condition(workspace_id):
            case "missing":
                raise NotFound(f"there is no workspace {workspace_id}", hint=f"skep workspace create {workspace_id}")
            case "half-made":
                raise WorkspaceDamaged(
                    f"workspace {workspace_id} was never finished",
                    hint=f"skep workspace create {workspace_id} starts over; there is nothing of an agent's in it",
                )
            case "unmarked":
                raise WorkspaceDamaged(
                    f"workspace {workspace_id} has lost the mark of a finished one, {MARK}",
                    hint=f"its files are safe: skep workspace repair {workspace_id}",
                )

    def census(self) -> Census:
        """Look at every workspace."""
        found = Census()
        for workspace_id in self._ids():
            match self.condition(workspace_id):
                case "half-made":
                    found.half_made.append(workspace_id)
                case "plain":
                    found.plain.append(workspace_id)
                case "ready" | "unmarked":
                    try:
                        self.need(workspace_id)
                        found.manifests[workspace_id] = manifests.read(self.path(workspace_id))
                    except NotFound:
                        continue  # destroyed since it was listed
                    except WorkspaceDamaged as error:
                        if self.condition(workspace_id) != "missing":
                            found.damaged[workspace_id] = error
        return found

    def _ids(self) -> list[str]:
        found = []
        with suppress(FileNotFoundError):
            for path in sorted(self.folder.iterdir()):
                with suppress(SkepError):
                    found.append(check_id(path.name))
        return found

    def remove(self, holding: Holding) -> None:
        """Take the name from the folder of a workspace that is held: at once it is none any more."""
        name = f"{_GONE}{holding.folder.name}-{secrets.token_hex(4)}"
        with explained(str(holding.folder)):
            holding.folder.rename(self.folder / name)
            manifests.sync(self.folder)

    def sweep_half_made(self) -> list[str]:
        """Remove workspaces that were never finished and that nobody is making."""
        swept = []
        for workspace_id in self.census().half_made:
            with suppress(WorkspaceBusy, FileNotFoundError):
                holding = Holding.take(self.path(workspace_id))
                try:
                    if self.condition(workspace_id) == "half-made":
                        self.remove(holding)
                        swept.append(workspace_id)
                finally:
                    holding.close()
        return swept

    def collect(self) -> list[str]:
        """Drop the trees that are known to be needed no more, and return their ids. Only for who is alone."""
        self._trees.drop_drafts()
        found = self.census()
        if found.damaged:
            return []  # one that cannot be read may need any of them
        garbage = self._unneeded(found) & self._trees.all()
        self._trees.drop(garbage)
        for folder, _ in self._gone():
            _remove(folder)
        return sorted(garbage)

    def _unneeded(self, found: Census) -> set[str]:
        present = found.manifests.values()
        needed = {tree_id for manifest in present for tree_id in manifest.trees()}
        # Whoever is making one waits, or it would have been swept before.
        needed |= {tree_id for manifest in self._half_made(found) for tree_id in manifest.trees()}
        gone = [manifest for _, manifest in self._gone() if manifest is not None]
        let_go = {tree_id for manifest in gone for tree_id in manifest.trees()}
        let_go |= {tree_id for manifest in (*present, *gone) for tree_id in manifest.dropped}
        births = {NOBODY, *(manifest.birth for manifest in (*present, *gone))}
        let_go |= {tree_id for tree_id in self._trees.all() if self._trees.note(tree_id).birth in births}
        return let_go - needed

    def _half_made(self, found: Census) -> Iterator[Manifest]:
        for workspace_id in found.half_made:
            with suppress(WorkspaceDamaged):
                yield manifests.read(self.path(workspace_id))

    def _gone(self) -> Iterator[tuple[Path, Manifest | None]]:
        for folder in self.folder.glob(f"{_GONE}*"):
            try:
                yield folder, manifests.read(folder)
            except WorkspaceDamaged:
                yield folder, None

    def lost(self) -> dict[str, Manifest]:
        """Return the workspaces whose folder or manifest is gone though their files are there, as they last were."""
        found = self.census()
        known_of = [*found.manifests.values(), *self._half_made(found), *filter(None, (one for _, one in self._gone()))]
        accounted = {tree_id for manifest in known_of for tree_id in manifest.trees()}
        there = self._trees.all()
        newest: dict[str, Manifest] = {}
        for tree_id in there - accounted:
            with suppress(WorkspaceDamaged):
                copy = manifests.read(self._trees.beside(tree_id, "."))
                known = newest.get(copy.id)
                newer = known is None or (known.created_at, known.generation) < (copy.created_at, copy.generation)
                if newer and copy.id not in found.manifests and copy.trees() <= there:
                    newest[copy.id] = copy
        return newest


def _remove(folder: Path) -> None:
    with suppress(OSError):  # what stays is removed by the next sweep
        erase(str(folder), folder.lstat().st_ino)
