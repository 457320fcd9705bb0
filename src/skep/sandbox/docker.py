"""Containers of a Docker engine on this machine, with the same agent inside as bubblewrap's.

The engine makes the container: no capability, no new privileges, a system call filter, its root read-only, no network
device but loopback. Its first process is the native agent, which calls this process on a socket that is shown inside;
from then on commands, files and the network go past the engine, as fast as with bubblewrap.

Unlike bubblewrap's, a container has no user namespace of its own: its user is one of the host's.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Mapping
from typing import ClassVar

from skep.errors import InvalidRequest, SandboxLost, SandboxUnusable
from skep.sandbox.agent import NETWORK, Agent, closed_in_children
from skep.sandbox.cgroups import check
from skep.sandbox.claim import claim
from skep.sandbox.containers.container import Container
from skep.sandbox.containers.engine import Engine
from skep.sandbox.containers.furniture import Furniture, furnish
from skep.sandbox.containers.images import Image, bare_image, named_image, rootfs_image
from skep.sandbox.containers.options import Options
from skep.sandbox.containers.orphans import sweep_once as sweep_containers_once
from skep.sandbox.egress.gate import Passage
from skep.sandbox.leftovers import sweep_once
from skep.sandbox.limits import CommandLimits
from skep.sandbox.recipe import Recipe
from skep.sandbox.resident import ResidentSandbox, lay_out, passage_for
from skep.sandbox.stack import prepare
from skep.sandbox.tree import Tree

_READY_S = 10.0


class DockerSandbox(ResidentSandbox):
    """A sandbox held by a container and the native agent."""

    mechanism: ClassVar[str] = "docker"

    def __init__(
        self, recipe: Recipe, container: Container, agent: Agent, files: Tree, passage: Passage | None, image: Image
    ) -> None:
        super().__init__(recipe, container, agent, files, passage)
        self.container = container
        self._env = {**image.environment, **self._env, "PATH": _path(self._env, recipe.env, image.environment)}

    @classmethod
    async def start_from(cls, recipe: Recipe) -> DockerSandbox:
        """Start a sandbox; it serves commands when this returns."""
        options = Options.read(recipe.options)
        engine = await Engine.at(options.host)
        _require_possible(recipe)
        container = Container.plan(engine)
        agent, root = None, -1
        try:
            passage = passage_for(recipe, container.id)
            furniture, workspace = await asyncio.to_thread(_furnished, container, recipe, options, passage)
            image = await _image(engine, options, furniture)
            control = await container.start(image.name, furniture, recipe, options.runtime)
            closed_in_children().add(control)
            agent = Agent(control)
            root = await _ready(agent)
            await _settle(agent, container, recipe, root, workspace)
            if passage is not None:
                await passage.open((await agent.ask(NETWORK)).fd)
        except BaseException:
            if agent is not None:
                agent.close()
            if root >= 0:
                os.close(root)
            await container.end()
            raise
        sweep_once()
        sweep_containers_once(engine)
        return cls(recipe, container, agent, Tree(root, owner=container.owner, lost=agent.lost), passage, image)

    def _rlimits_for(self, command: CommandLimits) -> dict[int, tuple[int, int]]:
        limits = super()._rlimits_for(command)
        if self._housing.owner is None and command.processes is None:
            # The kernel would count every process of this user on the machine. The container's own limit holds.
            limits.pop(resource.RLIMIT_NPROC, None)
        return limits


async def start(recipe: Recipe) -> DockerSandbox:
    """Start a sandbox with this mechanism."""
    return await DockerSandbox.start_from(recipe)


def _require_possible(recipe: Recipe) -> None:
    check(recipe.limits)
    if os.geteuid() == 0:
        return
    if recipe.network is not None:
        raise InvalidRequest(
            "only root can let a container out through Skep's own gate: its network belongs to the machine's root",
            hint="run Skep as root, or use the mechanism bubblewrap",
        )
    if recipe.mounts or (recipe.stack is not None and recipe.stack.layers):
        raise InvalidRequest(
            "only root can lay a workspace's layers in a container", hint="copy them, or use the mechanism bubblewrap"
        )


def _furnished(
    container: Container, recipe: Recipe, options: Options, passage: Passage | None
) -> tuple[Furniture, tuple[int, int]]:
    """Take the workspace and lay out what the container is shown; return that, and which folder the workspace is."""
    path = recipe.stack.upper if recipe.stack else recipe.folder or f"{container.folder}/workspace"
    folder, container.owner = claim(path, adopt=recipe.adopt)
    try:
        found = os.fstat(folder)
        workspace = os.readlink(f"/proc/self/fd/{folder}")
    finally:
        os.close(folder)
    if recipe.stack is not None:
        prepare(recipe.stack, container.owner)
    furniture = furnish(
        container.folder,
        recipe,
        user=container.user,
        workspace=workspace,
        bare=options.is_bare,
        certificate=passage.certificate if passage else None,
    )
    return furniture, (found.st_dev, found.st_ino)


async def _image(engine: Engine, options: Options, furniture: Furniture) -> Image:
    if options.image is not None:
        return await named_image(engine, options.image)
    if options.rootfs is not None:
        return await rootfs_image(engine, options.rootfs)
    return await bare_image(engine, furniture.links)


async def _ready(agent: Agent) -> int:
    try:
        async with asyncio.timeout(_READY_S):
            return await agent.ready()
    except (SandboxLost, TimeoutError) as error:
        raise SandboxUnusable(
            "the agent in the container does not serve", hint="`docker info` shows whether the engine has seccomp"
        ) from error


async def _settle(agent: Agent, container: Container, recipe: Recipe, root: int, workspace: tuple[int, int]) -> None:
    """Do what can only be done once the container runs."""
    await container.watch_engine(agent)
    await lay_out(agent, recipe, container.owner)
    if recipe.stack is not None and recipe.stack.layers:
        return
    found = os.stat("workspace", dir_fd=root, follow_symlinks=False)
    if (found.st_dev, found.st_ino) != workspace:
        raise SandboxUnusable(
            "the container shows another folder as its workspace than the one that was given",
            hint="run Skep where the engine runs, not in a container that only has its socket",
        )


def _path(usual: Mapping[str, str], given: Mapping[str, str], of_image: Mapping[str, str]) -> str:
    """Return where programs are looked for: first in the workspace, then where the image says."""
    if "PATH" in given or "PATH" not in of_image:
        return usual["PATH"]
    own = [folder for folder in usual["PATH"].split(":") if folder.startswith("/workspace/")]
    return ":".join([*own, of_image["PATH"]])
