"""Keep the state of a workspace, and return to it.

While nothing runs in a workspace its state is kept by sealing: the tree that was written becomes the uppermost of those
that are only read, and a new one is written. While something runs, the tree is copied with everything inside halted.
Where workspaces have no layers, a kept state is always a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from skep.errors import InvalidRequest, SandboxLost, SandboxUnusable, WorkspaceBusy
from skep.workspace.faults import in_thread
from skep.workspace.held import Held
from skep.workspace.manifest import Checkpoint, Manifest, State

Then = Callable[[Manifest, State], Manifest]


async def freeze(held: Held, then: Then = lambda manifest, _: manifest) -> State:
    """Keep the present state and return it. `then` may add something to the manifest that is written with it.

    Call it while trees are kept from being collected: a copy is not in the manifest unless `then` puts it there.
    """
    await held.come_home()
    manifest = held.manifest
    if held.grounds.layering == "copy":
        return await _copy(held, then)
    if await in_thread(held.grounds.trees.empty, manifest.upper):
        after = then(manifest, manifest.below)
        if after is not manifest:
            await held.save(after)
            held.grounds.on_phase("kept")
        return manifest.below
    try:
        return await _seal(held, then)
    except WorkspaceBusy:
        return await _copy(held, then)


async def _seal(held: Held, then: Then) -> State:
    before, grounds = held.manifest, held.grounds
    upper = await in_thread(grounds.next_upper, before, [str(grounds.trees.tree(before.upper))])
    grounds.on_phase("new upper")
    state = before.below.model_copy(update={"layers": (before.upper, *before.layers)})
    after = then(before, state)
    await held.save(after.model_copy(update={"generation": before.generation}).changed(upper=upper, below=state))
    grounds.on_phase("sealed")
    await _swap_or_revert(held, before)
    grounds.on_phase("swapped")
    return state


async def _swap_or_revert(held: Held, before: Manifest) -> None:
    """Move a running sandbox to the new tree; if it has to stay where it is, so does the manifest."""
    try:
        await held.swap()
    except (WorkspaceBusy, SandboxUnusable):
        held.grounds.on_phase("busy")
        try:
            await held.save(before.model_copy(update={"generation": held.manifest.generation}).changed())
        except BaseException:
            await held.stop()  # or it would go on writing to a tree that the manifest calls sealed
            raise
        raise
    except BaseException:
        await held.stop()
        raise


async def _copy(held: Held, then: Then) -> State:
    before, grounds = held.manifest, held.grounds
    async with held.halted():
        copy = await in_thread(grounds.copy_upper, before)
    grounds.on_phase("copied")
    state = before.below.model_copy(update={"layers": (copy, *before.layers)})
    after = then(before, state)
    if after is not before:
        await held.save(after)
        grounds.on_phase("kept")
    return state


async def take(held: Held, name: str | None, note: str) -> Checkpoint:
    """Make a checkpoint of the present state."""
    made: list[Checkpoint] = []

    def then(manifest: Manifest, state: State) -> Manifest:
        made[:] = [_checkpoint(manifest, state, name=_checked(name), note=note[:1000])]
        return manifest.changed(checkpoints=(*manifest.checkpoints, *made))

    async with held.grounds.referring():
        await freeze(held, then)
    return made[0]


async def roll_back(held: Held, target: Checkpoint) -> Checkpoint:
    """Return to a checkpoint; what runs inside is ended. The state that is left becomes a checkpoint itself."""
    await held.come_home(for_good=True)
    before, grounds = held.manifest, held.grounds
    if sandbox := await held.live():
        with suppress(SandboxLost):
            await sandbox.kill_all()
    async with grounds.referring():
        layers = await in_thread(grounds.layers, target.state, before.template)
        await in_thread(grounds.trees.check, target.state.layers)
        left = before.below
        if not await in_thread(grounds.trees.empty, before.upper):
            left = left.model_copy(update={"layers": (before.upper, *before.layers)})
        undo = _checkpoint(before, left, name=None, note=f"before the return to {target.title}")
        if grounds.layering == "copy":
            upper = await in_thread(grounds.copy, before, layers)
            below = target.state.model_copy(update={"layers": (), "based": False})
        else:
            upper, below = await in_thread(grounds.next_upper, before, layers), target.state
        grounds.on_phase("new upper")
        await held.save(before.changed(upper=upper, below=below, checkpoints=(*before.checkpoints, undo)))
        grounds.on_phase("rolled back")
    await held.swap_now()
    grounds.on_phase("swapped")
    return undo


async def forget(held: Held, target: Checkpoint) -> None:
    """Let go of a checkpoint; what only it needed is removed by the next sweep."""
    kept = tuple(checkpoint for checkpoint in held.manifest.checkpoints if checkpoint.id != target.id)
    await held.save(held.manifest.changed(checkpoints=kept))


def _checkpoint(manifest: Manifest, state: State, *, name: str | None, note: str) -> Checkpoint:
    # The generation only grows, so no id returns.
    return Checkpoint(
        id=f"c{manifest.generation + 1:04d}", name=name, note=note, created_at=datetime.now(UTC), state=state
    )


def _checked(name: str | None) -> str | None:
    if name is not None and not (0 < len(name) <= 100 and name.isprintable() and name.strip() == name):
        raise InvalidRequest(
            f"not a usable name for a checkpoint: {name[:60]!a}", hint="use up to 100 printable characters"
        )
    return name
