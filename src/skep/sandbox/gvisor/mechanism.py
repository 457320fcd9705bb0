"""Start a gVisor sandbox: by runsc itself, or by an engine that knows it."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import TYPE_CHECKING

from skep.errors import SandboxUnusable
from skep.sandbox.gvisor.bundle import Twin, prepare
from skep.sandbox.gvisor.house import Folder, House, Orders
from skep.sandbox.leftovers import sweep_once
from skep.sandbox.recipe import Recipe
from skep.sandbox.stream import StreamSandbox, twin_program

if TYPE_CHECKING:
    from skep.sandbox.gvisor.engine import Container

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: What holds for every sandbox. Control groups are joined before runsc starts, which needs no privilege then.
_FLAGS = ("--rootless", "--network=none", "--ignore-cgroups", "--file-access-mounts=shared", "--overlay2=none")


async def start(recipe: Recipe) -> StreamSandbox:
    """Start a sandbox with this mechanism."""
    _refuse(recipe)
    house = await _open(recipe, Twin(twin_program(), ("--alone",)))
    try:
        sandbox = await StreamSandbox.over(house.link, house, recipe, mechanism="gvisor")
    except SandboxUnusable as error:
        raise SandboxUnusable(
            f"the gVisor sandbox did not start: {house.complaint() or error.message}",
            hint="`skep doctor` shows what this machine lacks and how to fix it",
        ) from error
    if isinstance(house, House):
        house.watch()
    sweep_once()
    return sandbox


async def _open(recipe: Recipe, twin: Twin) -> House | Container:
    if recipe.options.get("engine"):
        from skep.sandbox.gvisor.engine import open_container

        return await open_container(recipe, twin)
    return await open_house(recipe, twin)


async def open_house(recipe: Recipe, twin: Twin) -> House:
    """Make all that a sandbox needs on the host, and start runsc with a program in it."""
    runsc = find_runsc(recipe.options.get("path"))
    # In the event loop's own thread: the kernel ends runsc with the thread that has started it.
    folder = Folder.make()
    try:
        return House.start(folder, _order(folder, recipe, twin, runsc), recipe.limits)
    except BaseException:
        await asyncio.to_thread(folder.remove)
        raise


def find_runsc(named: str | None = None) -> str:
    """Return the path of runsc: the one that is named, or the system's."""
    path = shutil.which(named or "runsc", path=None if named else _SYSTEM_PATH)
    if path is None:
        raise SandboxUnusable(
            f"there is no {named or 'runsc'} on this machine", hint="install gVisor: sudo apt-get install runsc"
        )
    return path


def _order(folder: Folder, recipe: Recipe, twin: Twin, runsc: str) -> Orders:
    bundle, user = prepare(folder.path, recipe, twin)
    bundle.write()
    state = folder.path / "state"
    state.mkdir(mode=0o700)
    # runsc walks to the bundle and writes its state as the sandbox's own user.
    for path in (folder.path, state):
        os.chown(path, *user)
    argv = (runsc, f"--root={bundle.seen}/state", *_FLAGS, "run", f"--bundle={bundle.seen}", folder.id)
    return Orders(argv, user, (str(folder.path), str(bundle.seen)), tuple(bundle.binds))


def _refuse(recipe: Recipe) -> None:
    """Say what this mechanism does not have, rather than leave it out."""
    if recipe.network is not None:
        raise SandboxUnusable(
            "a gVisor sandbox has no network: Skep's allow-list cannot reach into its own kernel",
            hint="use bubblewrap for work that needs a network, or leave network= out",
        )
    if recipe.mounts or (recipe.stack is not None and recipe.stack.layers):
        raise SandboxUnusable(
            "a gVisor sandbox works in one plain folder, without layers and without folders mounted in it",
            hint="copy what it needs into the workspace, or show it read-only outside of it with read_only=",
        )
