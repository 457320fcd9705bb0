"""Put a workspace away in an archive, and make one of what an archive holds.

An archive holds the present state: what the workspace has over its snapshot, and the snapshot. Its checkpoints stay
behind. A workspace that comes back appears in one step, when all of it is on the disk and has been verified.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skep.errors import ArchiveDamaged, Conflict, WorkspaceDamaged
from skep.sandbox.claim import Owner, claim
from skep.sandbox.erase import erase
from skep.sandbox.stack import Mount
from skep.workspace import making
from skep.workspace import manifest as manifests
from skep.workspace.archive.archive import Archive, Restored, Saved
from skep.workspace.archive.index import Index, SnapshotName
from skep.workspace.archive.watch import Progress
from skep.workspace.faults import explained, in_thread, whole
from skep.workspace.grounds import Grounds
from skep.workspace.holding import Holding
from skep.workspace.manifest import Manifest, Packages, Shown, State
from skep.workspace.register import Register
from skep.workspace.snapshot.shelf import Shelf
from skep.workspace.snapshot.snapshot import Record, Snapshot, write
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.workspace import Workspace
from skep.workspace.workspaces import Workspaces

Tell = Callable[[Progress], None]


async def save(workspace: Workspace, archive: Archive, *, on_progress: Tell | None = None) -> Saved:
    """Save the present state of a workspace under its id. What runs in it goes on, and is halted while it is copied."""
    grounds = workspace.grounds
    async with grounds.referring():
        state = await workspace.freeze()
        # Where nothing was ever written, the tree that is to be written stands for it.
        trees = state.layers or (workspace.manifest.upper,)
        return await archive.save(
            workspace.id,
            [str(grounds.trees.tree(tree_id)) for tree_id in trees],
            snapshot=_snapshot(grounds, workspace.manifest, state),
            meta=_meta(workspace.manifest, state),
            on_progress=on_progress,
        )


def _snapshot(grounds: Grounds, manifest: Manifest, state: State) -> Snapshot | None:
    if not state.based or state.snapshot_version is None:
        return None
    return grounds.snapshots.get(manifest.template, state.snapshot_version)


def _meta(manifest: Manifest, state: State) -> dict[str, Any]:
    packages = state.packages.model_dump(mode="json")
    return {"template": manifest.template, "packages": packages, "labels": manifest.labels}


@dataclass(frozen=True, slots=True)
class Homecoming:
    """Brings workspaces back from one archive."""

    archive: Archive
    workspaces: Workspaces
    snapshots: Snapshots
    on_progress: Tell | None = None

    async def restore(
        self,
        name: str,
        *,
        version: str | None = None,
        workspace_id: str | None = None,
        shown: Sequence[Mount] = (),
        labels: Mapping[str, str] | None = None,
    ) -> tuple[Manifest, Restored]:
        """Make a workspace of an archive, the newest if none is named; under another id if that is given.

        Under its own id it has the labels that it had, unless others are given.
        One that is there is `Conflict`: nothing is ever restored over something else.
        """
        new_id = workspace_id or name
        register = self.workspaces.register
        if register.condition(new_id) not in ("missing", "half-made"):
            raise Conflict(f"there is a workspace {new_id} already", hint="restore it under another id, with --as")
        index = await self.archive.show(name, version=version)
        below = None if index.snapshot is None else await self._ready(index.snapshot)
        holding = await in_thread(making.begin, register, new_id)
        try:
            manifest = _manifest(new_id, index, below, shown)
            if labels is not None:
                manifest = manifest.model_copy(update={"labels": dict(labels)})
            return await self._fetch(holding, manifest, index, below)
        except BaseException:
            if register.condition(new_id) == "half-made":
                await in_thread(register.remove, holding)
            raise
        finally:
            holding.close()

    async def _fetch(
        self, holding: Holding, manifest: Manifest, index: Index, below: Snapshot | None
    ) -> tuple[Manifest, Restored]:
        place = self.workspaces.home / "restoring" / manifest.id
        await in_thread(_discard, place)
        try:
            owner = await in_thread(_new_owner, place)
            restored = await self.archive.restore(
                index.name, place / "tree", version=index.version, owner=owner, on_progress=self.on_progress
            )
            return await whole(self._adopt(holding, manifest, place / "tree", owner, below)), restored
        finally:
            await in_thread(_discard, place)

    async def _adopt(
        self, holding: Holding, manifest: Manifest, tree: Path, owner: Owner | None, below: Snapshot | None
    ) -> Manifest:
        grounds = await self.workspaces.grounds()
        with below.pinned() if below else nullcontext():
            async with grounds.referring():
                return await in_thread(_appear, grounds, self.workspaces.register, holding, manifest, tree, owner)

    async def _ready(self, wanted: SnapshotName) -> Snapshot:
        """Find the snapshot with the content that an archive stands on, or take it from the archive."""
        shelf = Shelf(self.snapshots.folder / wanted.template)
        if (here := shelf.with_hash(wanted.hash)) is not None:
            return here
        async with shelf.building(lambda _: None):
            if (here := shelf.with_hash(wanted.hash)) is not None:
                return here
            draft = shelf.new_draft()
            try:
                _, record = await self.archive.restore_snapshot(
                    wanted.hash, draft / "tree", on_progress=self.on_progress
                )
                version = shelf.next_version(wanted.hash)
                write(draft, _record(record, wanted, version))
                made = shelf.publish(draft, version)
            finally:
                await in_thread(shelf.discard, draft)
        return made if shelf.built() else shelf.point(version)


def _record(text: str | None, wanted: SnapshotName, version: str) -> Record:
    """Read the record of a snapshot that came with an archive; here it has another number."""
    try:
        record = Record.model_validate_json(text or "")
    except ValueError as error:
        raise ArchiveDamaged(
            f"the archive does not say what the snapshot {wanted.version} of {wanted.template} holds",
            hint="restore an older version of it",
        ) from error
    if record.hash != wanted.hash or not re.fullmatch(r"[0-9a-f]{64}", record.hash):
        raise ArchiveDamaged(f"the archive holds another snapshot than {wanted.version}", hint="restore an older one")
    return record.model_copy(update={"template": wanted.template, "version": version})


def _manifest(new_id: str, index: Index, below: Snapshot | None, shown: Sequence[Mount]) -> Manifest:
    state = State(
        based=below is not None,
        snapshot_version=below.version if below else None,
        packages=Packages.model_validate(index.meta.get("packages", {})),
    )
    template = below.template if below else str(index.meta.get("template", "minimal"))
    places = tuple(Shown(host=mount.host, inside=mount.inside, mode=mount.mode) for mount in shown)
    labels = _labels(index) if new_id == index.name else {}
    return making.born(new_id, template, state).model_copy(update={"shown": places, "labels": labels})


def _labels(index: Index) -> dict[str, str]:
    return {str(name): str(value) for name, value in dict(index.meta.get("labels", {})).items()}


def _new_owner(place: Path) -> Owner | None:
    """Choose the user that a restored tree belongs to, as for a workspace that is new."""
    with explained(str(place)):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = place / "owner"
        fd, owner = claim(str(probe))
        os.close(fd)
        probe.rmdir()
    return owner


def _appear(
    grounds: Grounds, register: Register, holding: Holding, manifest: Manifest, tree: Path, owner: Owner | None
) -> Manifest:
    """Make a workspace of a tree that was restored; what cannot be finished leaves nothing behind."""
    layer = secrets.token_hex(8)
    layered = manifest.model_copy(update={"below": manifest.below.model_copy(update={"layers": (layer,)})})
    _drop_attempt(grounds, holding.folder)
    # The manifest comes first: whatever is made after it is known to belong to it.
    manifests.write(holding.folder, layered)
    grounds.on_phase("named")
    grounds.trees.new(layer, birth=manifest.birth, owner=owner, fill=lambda target, _: _move(tree, target))
    grounds.on_phase("moved")
    if grounds.layering == "overlay":
        _finish(grounds, register, holding, layered, layer)
        return layered
    flat = manifest.below.model_copy(update={"based": False})
    copied = manifest.model_copy(update={"below": flat, "dropped": (layer,)})
    below = grounds.layers(layered.below, manifest.template)
    _finish(grounds, register, holding, copied, layer, copy_of=below)
    grounds.trees.drop([layer])
    return copied


def _finish(
    grounds: Grounds,
    register: Register,
    holding: Holding,
    manifest: Manifest,
    layer: str,
    copy_of: list[str] | None = None,
) -> None:
    made = [(holding, manifest)]
    try:
        # What was restored has the folders that every workspace has, or its agent has removed them.
        making.furnish(grounds, holding, manifest, copy_of=copy_of, bare=True)
        making.finish(grounds, made)
    except BaseException:
        grounds.trees.drop([layer])
        making.unmake(grounds, register, made)
        raise


def _drop_attempt(grounds: Grounds, folder: Path) -> None:
    """Drop the trees of an earlier attempt that was killed; those that it only shares are another's."""
    with suppress(WorkspaceDamaged):  # there was none
        birth = manifests.read(folder).birth
        grounds.trees.drop([tree for tree in grounds.trees.all() if grounds.trees.note(tree).birth == birth])
        grounds.trees.clear()


def _move(source: Path, target: Path) -> None:
    """Take the place of an empty folder."""
    source.rename(target)


def _discard(place: Path) -> None:
    if place.exists():
        erase(str(place), place.stat().st_ino)
