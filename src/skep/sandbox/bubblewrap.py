"""The default mechanism: bubblewrap, rootless, one long-lived sandbox per workspace.

A launcher joins the control groups, drops to a user of its own when Skep runs as root, and becomes bwrap, which
builds the namespaces and starts the native agent as pid 1 inside. From then on commands enter through the agent's
socket, without another bwrap.

Nothing is ever mounted at a path below a folder that the agent can write: bwrap before 0.12 can be led out of the
sandbox by a link planted at such a mount point.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from functools import cache
from typing import ClassVar

from skep.errors import SandboxLost, SandboxUnusable
from skep.sandbox import kernels, seccomp
from skep.sandbox.agent import NETWORK, Agent
from skep.sandbox.binary import Bwrap, native
from skep.sandbox.claim import claim
from skep.sandbox.egress.gate import Passage
from skep.sandbox.launcher import Launcher, Plan, spare
from skep.sandbox.leftovers import sweep_once
from skep.sandbox.recipe import Recipe
from skep.sandbox.resident import ResidentSandbox, lay_out, passage_for
from skep.sandbox.rootfs import extra_planks, mount_point, network_planks, system_planks
from skep.sandbox.stack import prepare
from skep.sandbox.tree import Tree

_READY_S = 10.0
_INSIDE_UID = 1000
#: Room for what root changes in /etc, and as much in /home and in /var/tmp.
_USERS_BYTES = 64 << 20


class BubblewrapSandbox(ResidentSandbox):
    """A sandbox held by bubblewrap and the native agent."""

    mechanism: ClassVar[str] = "bubblewrap"

    def __init__(
        self, recipe: Recipe, launcher: Launcher, agent: Agent, files: Tree, passage: Passage | None = None
    ) -> None:
        super().__init__(recipe, launcher, agent, files, passage)
        #: The process outside that holds everything inside, with its control group and record.
        self.launcher = launcher

    @classmethod
    async def start_from(cls, recipe: Recipe, *, plan: Plan | None = None, spares: bool = True) -> BubblewrapSandbox:
        """Start a sandbox; it serves commands when this returns. With `spares` the next one starts faster."""
        launcher = spare().take()
        agent = Agent(launcher.control)
        passage = passage_for(recipe, launcher.id)
        try:
            plan = plan or draw_plan(
                recipe,
                throwaway=launcher.record.planned_throwaway,
                certificate=passage.certificate if passage else None,
            )
            await launcher.go(agent, plan, recipe.limits)
            root = await _ready(agent, launcher)
            await lay_out(agent, recipe, launcher.owner)
            if passage is not None:
                await passage.open((await agent.ask(NETWORK)).fd)
        except BaseException:
            agent.close()
            await launcher.end()
            raise
        if spares:
            spare().refill()
        sweep_once()
        return cls(recipe, launcher, agent, Tree(root, owner=plan.owner, lost=agent.lost), passage)


async def start(recipe: Recipe) -> BubblewrapSandbox:
    """Start a sandbox with this mechanism."""
    return await BubblewrapSandbox.start_from(recipe)


def draw_plan(
    recipe: Recipe,
    *,
    bwrap: Bwrap | None = None,
    filter_program: bytes | None = None,
    throwaway: str | None = None,
    certificate: bytes | None = None,
) -> Plan:
    """Decide everything about a sandbox before anything is started.

    `filter_program` is for tests that show what the system call filter stops. `throwaway` is the folder to make for
    a recipe that names none. `certificate` is that of the authority which a sandbox with a network trusts.
    """
    bwrap = bwrap or Bwrap.find()
    kept = recipe.stack.upper if recipe.stack else recipe.folder
    path = kept or _new_folder(throwaway)
    folder, owner = claim(path, adopt=recipe.adopt)
    plan = Plan(bwrap, owner=owner, throwaway=None if kept else (path, os.fstat(folder).st_ino))
    try:
        if recipe.stack is not None:
            prepare(recipe.stack, owner)
        _furnish(plan, recipe, folder)
        if certificate is not None:
            for plank in network_planks(certificate):
                plank.lay(plan)
        plan.add("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/")
        plan.seccomp(_usual_filter() if filter_program is None else filter_program)
    except BaseException:
        plan.close()
        raise
    return plan


@cache
def _usual_filter() -> bytes:
    return seccomp.assemble()


def _furnish(plan: Plan, recipe: Recipe, workspace: int) -> None:
    plan.add(*_NAMESPACES, "--uid", str(_INSIDE_UID), "--gid", str(_INSIDE_UID))
    if recipe.options.get("users"):
        # For callers whose root adds users and installs tools. Before the rest: what lies in /etc is laid into it.
        for mode, place in (("0755", "/etc"), ("0755", "/home"), ("1777", "/var/tmp")):
            plan.add("--perms", mode, "--size", str(_USERS_BYTES), "--tmpfs", place)
    for plank in (*system_planks(), *extra_planks(recipe.read_only)):
        plank.lay(plan)
    plan.add("--proc", "/proc", "--dev", "/dev")
    for size, mode, place in (
        (recipe.limits.shm_bytes, "1777", "/dev/shm"),
        (recipe.limits.tmp_bytes, "1777", "/tmp"),
        (recipe.limits.cache_bytes, "0755", "/cache"),
    ):
        plan.add("--perms", mode, "--size", str(size), "--tmpfs", place)
    plan.bind(os.open(native("skep-agent"), os.O_PATH | os.O_CLOEXEC), "/run/skep/agent")
    plan.bind(os.open(native("skep-fakeroot.so"), os.O_PATH | os.O_CLOEXEC), "/run/skep/fakeroot.so")
    plan.bind(os.open(kernels.FOLDER, os.O_PATH | os.O_CLOEXEC), kernels.INSIDE)
    if recipe.stack is not None and recipe.stack.layers:
        os.close(workspace)
        plan.add("--dir", "/workspace")  # the layers come once the namespaces are there
    else:
        plan.bind(workspace, "/workspace", read_only=False)
    for mount in recipe.mounts:
        if not mount.in_workspace:
            plan.add("--dir", mount_point(mount.inside))


def _new_folder(path: str | None) -> str:
    if path is None:
        return tempfile.mkdtemp(prefix="skep-workspace-")
    os.mkdir(path, 0o700)
    return path


_NAMESPACES = (
    "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
    "--disable-userns", "--cap-drop", "ALL", "--new-session", "--as-pid-1", "--clearenv", "--hostname", "skep",
)  # fmt: skip


async def _ready(agent: Agent, launcher: Launcher) -> int:
    try:
        async with asyncio.timeout(_READY_S):
            return await agent.ready()
    except (SandboxLost, TimeoutError) as error:
        said = launcher.complaint()
        raise SandboxUnusable(
            f"the sandbox did not start: {said or 'it gave no reason'}",
            hint="`skep doctor` shows what this machine lacks and how to fix it",
        ) from error
