"""Examine a workspace: whether it is whole, can be mounted, and has what it declares. Nothing is changed by it.

Only an install that was killed is completed on the way, as by everybody who takes hold of the workspace.
"""

from __future__ import annotations

from skep.errors import SkepError, WorkspaceBusy
from skep.sandbox.sandbox import Sandbox
from skep.workspace.faults import in_thread
from skep.workspace.grounds import Grounds
from skep.workspace.health.examination import Examination, node_wanted, python_wanted, snapshot_below
from skep.workspace.health.finding import Finding, Report
from skep.workspace.manifest import Manifest
from skep.workspace.packages.environment import Environment, site_packages, touched
from skep.workspace.workspaces import Workspaces

__all__ = ["Finding", "Report", "examine"]


async def examine(workspaces: Workspaces, workspace_id: str, *, thorough: bool = False) -> Report:
    """Look at everything that can be wrong with a workspace. `thorough` imports every package, which takes seconds.

    One that another process holds is looked at through that one's sandbox.
    """
    found = Examination(workspaces, workspace_id)
    manifest = await in_thread(found.standing)
    if manifest is None:
        return found.report()
    if manifest.out is not None:
        manifest = await _brought_home(found, workspaces)
        if manifest is None:
            return found.report()
    grounds = await workspaces.grounds()
    layers = await in_thread(found.ground, grounds, manifest)
    if layers is None:
        return found.report()
    if manifest.suspended:
        found.note("mount", "ok", "it is suspended: nothing runs in it, and what is inside was not looked at")
        return found.report()
    try:
        async with workspaces.enter(workspace_id) as sandbox:
            found.note("mount", "ok", "a sandbox starts over it" if len(layers) == 1 else "its layers can be mounted")
            await _inside(found, grounds, sandbox, thorough=thorough)
    except WorkspaceBusy as error:
        found.note("mount", "warning", f"it is in use and cannot be looked into: {error.message}", "try again later")
    except SkepError as error:
        found.note("mount", "broken", f"no sandbox can be started over it: {error.message}", error.hint)
    return found.report()


async def _brought_home(found: Examination, workspaces: Workspaces) -> Manifest | None:
    """Have the files here that a machine elsewhere has: older ones are not looked at in their place."""
    try:
        return await workspaces.fetch(found.id)
    except SkepError as error:
        found.note("files", "broken", error.message, error.hint)
        return None


async def _inside(found: Examination, grounds: Grounds, sandbox: Sandbox, *, thorough: bool) -> None:
    manifest = found.workspaces.show(found.id)  # who entered may have completed an install
    snapshot = await in_thread(snapshot_below, grounds, manifest)
    stack = grounds.stack(manifest)
    seen = await in_thread(Environment.read, (stack.upper, *stack.layers))

    def changed_in(folder: str) -> set[str] | None:
        """Say where a folder can differ from the snapshot's."""
        return touched((stack.upper, *stack.layers[:-1]), folder) if manifest.below.based and not thorough else None

    await in_thread(found.files, seen, manifest, snapshot)
    python = await in_thread(python_wanted, seen, manifest, snapshot)
    if python is not None:
        changed = await in_thread(changed_in, site_packages(seen.python_version or ""))
        await found.python(sandbox, python, changed=changed, thorough=thorough)
    changed = await in_thread(changed_in, "node_modules")
    wanted = await in_thread(node_wanted, seen, manifest, snapshot)
    await found.node(sandbox, seen, wanted, changed=changed, thorough=thorough)
