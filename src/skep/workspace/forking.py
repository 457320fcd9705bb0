"""Make workspaces that begin with what another one holds."""

from __future__ import annotations

from collections.abc import Sequence

from skep.errors import Conflict, InvalidRequest
from skep.workspace import making
from skep.workspace.faults import in_thread
from skep.workspace.holding import Holding
from skep.workspace.manifest import Manifest, State, check_id
from skep.workspace.register import Register
from skep.workspace.workspace import Workspace


async def fork(register: Register, source: Workspace, ids: Sequence[str], *, checkpoints: bool) -> list[Manifest]:
    """Make all of them, or none if it fails. A crash leaves those that were finished, each whole."""
    if len(set(ids)) < len(ids):
        raise InvalidRequest("an id is given twice", hint="give every fork an id of its own")
    for new_id in ids:
        if register.condition(check_id(new_id)) not in ("missing", "half-made"):
            raise Conflict(f"there is a workspace {new_id} already", hint="choose another id")
    async with source.grounds.referring():
        state = await source.freeze()
        source.grounds.on_phase("frozen")
        children = [_child(source.manifest, new_id, state, checkpoints=checkpoints) for new_id in ids]
        await in_thread(_make_all, register, source, children, state)
        if source.grounds.layering == "copy":  # the children have copies of their own
            source.grounds.trees.drop(state.layers)
    await in_thread(source.grounds.trees.clear)
    return children


def _child(parent: Manifest, new_id: str, state: State, *, checkpoints: bool) -> Manifest:
    kept = parent.checkpoints if checkpoints else ()
    return making.born(new_id, parent.template, state).model_copy(
        update={"parent": parent.id, "shown": parent.shown, "checkpoints": kept, "generation": len(kept)}
    )


def _make_all(register: Register, source: Workspace, children: list[Manifest], state: State) -> None:
    grounds = source.grounds
    copy_of = grounds.layers(state, source.manifest.template) if grounds.layering == "copy" else None
    if copy_of is not None:
        whole = state.model_copy(update={"layers": (), "based": False})
        children[:] = [child.model_copy(update={"below": whole}) for child in children]
    made: list[tuple[Holding, Manifest]] = []
    try:
        for child in children:
            holding = making.begin(register, child.id)
            made.append((holding, child))
            making.furnish(grounds, holding, child, copy_of=copy_of, bare=True)
        making.finish(grounds, made)
    except BaseException:
        making.unmake(grounds, register, made)
        raise
    finally:
        for holding, _ in made:
            holding.close()
