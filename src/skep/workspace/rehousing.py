"""Give a workspace another id, with all that it has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from skep.errors import Conflict, NotFound, WorkspaceDamaged
from skep.workspace import manifest as manifests
from skep.workspace.faults import explained, in_thread
from skep.workspace.grounds import Grounds
from skep.workspace.held import keep_copy
from skep.workspace.holding import Holding
from skep.workspace.workspaces import Workspaces


async def rehouse(workspaces: Workspaces, old_id: str, new_id: str, *, labels: Mapping[str, str]) -> None:
    """Give a workspace another id and labels; `WorkspaceBusy` while it is held, `Conflict` if the new id is taken.

    Its files stay where they are. One whose manifest cannot be read is moved as it is. What a crash leaves in the
    middle has the old folder still, and is finished by the next call.
    """
    grounds = await workspaces.grounds()
    async with grounds.referring():
        await in_thread(_rehouse, workspaces, grounds, (old_id, new_id), labels)


def _rehouse(workspaces: Workspaces, grounds: Grounds, ids: tuple[str, str], labels: Mapping[str, str]) -> None:
    register, (old_id, new_id) = workspaces.register, ids
    old, new = register.path(old_id), register.path(new_id)
    with explained(str(old)):
        if register.condition(new_id) != "missing":
            raise Conflict(f"there is a workspace {new_id} already", hint="destroy one of the two")
        if register.condition(old_id) == "plain":  # a folder of files, in which a lock has no place
            old.rename(new)
            manifests.sync(register.folder)
            return
        try:
            holding = Holding.take(old)
        except FileNotFoundError:
            raise NotFound(f"there is no workspace {old_id}", hint="skep workspace list") from None
        try:
            with suppress(WorkspaceDamaged):
                renamed = manifests.read(old).changed(id=new_id, labels=dict(labels))
                manifests.write(old, renamed)
                if grounds.trees.tree(renamed.upper).is_dir():
                    keep_copy(grounds, renamed)
            old.rename(new)
            manifests.sync(register.folder)
        finally:
            holding.close()
