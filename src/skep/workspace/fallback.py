"""Return a workspace of which folders are missing to its last good state, and keep what is left of the present one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from skep.errors import NotFound, WorkspaceDamaged
from skep.sandbox.claim import Owner
from skep.workspace.faults import explained, in_thread, whole
from skep.workspace.grounds import Grounds, resemble
from skep.workspace.held import Held, Outfit
from skep.workspace.holding import Holding
from skep.workspace.layers.copying import Copying, flush
from skep.workspace.manifest import Checkpoint, Manifest, State
from skep.workspace.workspaces import Workspaces


@dataclass(frozen=True, slots=True)
class Fallback:
    """What was done: the state that was returned to, if any, and the checkpoints of which folders are gone."""

    to: str | None = None
    broken: tuple[str, ...] = ()
    #: The checkpoint that was made of what is left of the state before.
    remains: str | None = None

    def lost(self) -> tuple[str, ...]:
        """Say what of the workspace is lost, a sentence for each."""
        told = [f"files of the checkpoint {title}" for title in self.broken]
        if self.to is not None:
            left = f"; what is left of it is the checkpoint {self.remains}" if self.remains else ""
            told.insert(0, f"everything since {self.to}, for files that were written after it are gone{left}")
        return tuple(told)


async def step_back(workspaces: Workspaces, workspace_id: str) -> Fallback | None:
    """Return to the newest state whose folders are all there; None if nothing is missing.

    Nothing that is left is removed: it becomes a checkpoint. `WorkspaceDamaged` if no state is whole.
    """
    grounds = await workspaces.grounds()
    with explained(str(workspaces.register.path(workspace_id))):
        try:
            holding = Holding.take(workspaces.register.path(workspace_id))
        except FileNotFoundError:
            raise NotFound(f"there is no workspace {workspace_id}", hint="skep workspace list") from None
    try:
        held = Held(grounds, holding, workspaces.register.show(workspace_id), Outfit())
        return await whole(_step_back(held))
    finally:
        holding.close()


async def _step_back(held: Held) -> Fallback | None:
    manifest, grounds = held.manifest, held.grounds
    async with grounds.referring():
        good = tuple(one for one in manifest.checkpoints if _is_whole(grounds, manifest, one.state))
        broken = tuple(one.title for one in manifest.checkpoints if one not in good)
        kept = tuple(_kept(grounds, manifest, good))
        if grounds.trees.tree(manifest.upper).is_dir() and _is_whole(grounds, manifest, manifest.below):
            if not broken:
                return None
            await held.save(manifest.changed(checkpoints=kept))
            return Fallback(broken=broken)
        title, state = _newest(grounds, manifest, good)
        upper, below = await in_thread(_over, grounds, manifest, state)
        remains = _remains(grounds, manifest, state)
        after = manifest.changed(
            upper=upper, below=below, installing=None, checkpoints=(*kept, *([remains] if remains else []))
        )
        await held.save(after)
    return Fallback(title, broken, remains.id if remains else None)


def _kept(grounds: Grounds, manifest: Manifest, good: tuple[Checkpoint, ...]) -> Iterator[Checkpoint]:
    """Yield the checkpoints, those that are not whole with the folders that are left of them."""
    for one in manifest.checkpoints:
        left = tuple(tree for tree in one.state.layers if grounds.trees.tree(tree).is_dir())
        if one in good:
            yield one
        elif left:
            note = f"folders of it are missing; {one.note}"[:1000]
            yield one.model_copy(update={"note": note, "state": one.state.model_copy(update={"layers": left})})


def _newest(grounds: Grounds, manifest: Manifest, good: tuple[Checkpoint, ...]) -> tuple[str, State]:
    for title, state in _states(manifest, good):
        if _is_whole(grounds, manifest, state):
            return title, state
    raise WorkspaceDamaged(
        f"folders of workspace {manifest.id} are missing, and none of its checkpoints is whole",
        hint="restore them from a backup of the disk, or the workspace from an archive",
    )


def _states(manifest: Manifest, good: tuple[Checkpoint, ...]) -> Iterator[tuple[str, State]]:
    """Yield the states that can be returned to, the newest first, with what each is called."""
    # What was sealed under the present state is a good one; but with nothing sealed it would be an empty workspace.
    if manifest.layers:
        same = [one.title for one in good if one.state.layers == manifest.layers]
        yield f"the checkpoint {same[-1]}" if same else "it was last sealed", manifest.below
    for one in reversed(good):
        yield f"the checkpoint {one.title}", one.state


def _is_whole(grounds: Grounds, manifest: Manifest, state: State) -> bool:
    try:
        return all(Path(layer).is_dir() for layer in grounds.layers(state, manifest.template))
    except WorkspaceDamaged:
        return False


def _over(grounds: Grounds, manifest: Manifest, state: State) -> tuple[str, State]:
    """Make a tree to be written over a state; where there are no layers it is a copy of it."""
    layers = grounds.layers(state, manifest.template)

    def cover(target: Path, _: Owner | None) -> None:
        resemble(target, layers)

    def copy(target: Path, owner: Owner | None) -> None:
        Copying(target, owner).run(layers, over=())
        flush(target)

    owner = _owner(grounds, manifest, state)
    if grounds.layering == "overlay":
        return grounds.trees.new(birth=manifest.birth, owner=owner, fill=cover), state
    flat = state.model_copy(update={"layers": (), "based": False})
    return grounds.trees.new(birth=manifest.birth, owner=owner, fill=copy), flat


def _owner(grounds: Grounds, manifest: Manifest, state: State) -> Owner | None:
    """Return the user of the workspace, as one of its own trees tells; None for a new one."""
    for tree_id in (manifest.upper, *state.layers):
        if grounds.trees.tree(tree_id).is_dir() and grounds.trees.note(tree_id).birth == manifest.birth:
            return grounds.trees.owner(tree_id)
    return None


def _remains(grounds: Grounds, manifest: Manifest, state: State) -> Checkpoint | None:
    """Make a checkpoint of the folders that are left of the present state, unless the other state has them all."""
    there = tuple(tree for tree in (manifest.upper, *manifest.layers) if grounds.trees.tree(tree).is_dir())
    if not {*there} - {*state.layers}:
        return None
    return Checkpoint(
        id=f"c{manifest.generation + 1:04d}",
        note="what was left of a state of which folders were missing",
        created_at=datetime.now(UTC),
        state=state.model_copy(update={"layers": there, "packages": manifest.packages}),
    )
