"""A sandbox whose first process is the native agent, on this machine's kernel: what is the same whatever houses it.

The agent's socket carries descriptors both ways. So commands run on pipes of the controller's own, files are worked on
through the sandbox's own root folder, and its network is entered from outside.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, Protocol

from skep.errors import InvalidRequest, SandboxLost, WorkspaceBusy
from skep.sandbox.agent import HOLD, NETWORK, PAUSE, REFUSED, RELEASE, RESUME, Agent, Report, Spawn
from skep.sandbox.cgroups import Group
from skep.sandbox.claim import Owner
from skep.sandbox.command import ENVIRONMENT, environment_of, rlimits, words
from skep.sandbox.egress.gate import Passage, gate
from skep.sandbox.egress.policy import Policy
from skep.sandbox.former import Former
from skep.sandbox.guest import Guest
from skep.sandbox.inlet import connected
from skep.sandbox.limits import CommandLimits, LimitName
from skep.sandbox.population import end_marked, has_processes
from skep.sandbox.process import AgentProcess
from skep.sandbox.recipe import Recipe
from skep.sandbox.sandbox import Command, Process, Sandbox, Size, User
from skep.sandbox.stack import Stack, lay, prepare
from skep.sandbox.tree import Tree
from skep.sandbox.watcher import Watcher

#: Ask the agent for its mount namespace, not that of its network.
MOUNTS = 1

_LIMIT_SIGNALS: dict[int, LimitName] = {signal.SIGXCPU: "cpu", signal.SIGXFSZ: "disk"}


class Housing(Protocol):
    """What a mechanism keeps around the agent."""

    @property
    def id(self) -> str: ...

    @property
    def group(self) -> Group:
        """The control group that holds the limits."""

    @property
    def owner(self) -> Owner | None:
        """The host user that everything inside runs as, if it is another than this process's."""

    async def end(self) -> None:
        """Wait until everything is gone, by force if need be, and remove what the sandbox held on the host."""


class ResidentSandbox(Sandbox):
    """A sandbox that the native agent serves."""

    def __init__(
        self, recipe: Recipe, housing: Housing, agent: Agent, files: Tree, passage: Passage | None = None
    ) -> None:
        super().__init__()
        self.id = housing.id
        self.limits = recipe.limits
        self.files: Tree = files
        self._env = {**ENVIRONMENT, **(passage.environment() if passage else {}), **recipe.env}
        self._passage = passage
        self._housing = housing
        self._group = housing.group
        self._agent = agent
        self._mounts = recipe.mounts
        self._former = Former()
        #: Cleared while the workspace is being swapped for another.
        self._settled = asyncio.Event()
        self._settled.set()
        self._watcher = Watcher(agent, files, recipe.limits, watch_memory=housing.group.way == "none")
        if recipe.stack is not None:
            self._watcher.count_in(recipe.stack.upper)
        self._stopping: asyncio.Task[None] | None = None
        self._rlimits = self._rlimits_for(CommandLimits())

    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User = "agent",
        stdin: bool = False,
        channel: bool = False,
        terminal: Size | None = None,
        timeout_s: float | None = None,
        limits: CommandLimits | None = None,
    ) -> Process:
        await self._settled.wait()
        spawn = Spawn(
            argv=words(command),
            env=environment_of(self._env, env, user=user, terminal=terminal),
            cwd=os.path.join("/workspace", cwd or ""),
            limits=self._rlimits if limits is None else self._rlimits_for(limits),
        )
        process = await AgentProcess.start(
            self._agent,
            spawn,
            judge=partial(self._judge, self._tally(), limits.cpu_s if limits else None),
            owner=self.files.owner,
            stdin=stdin,
            channel=channel,
            terminal=terminal,
            timeout_s=timeout_s,
        )
        self._watcher.watch(process)
        return process

    @property
    def limited_by(self) -> Literal["v2", "v1", "none"]:
        """Which control groups hold its limits; with none, rlimits and the watcher do."""
        return self._group.way

    async def alive(self) -> bool:
        return not self._agent.lost.is_set()

    async def occupied(self) -> bool:
        return self.guests > 0 or await self.files.examine(has_processes)

    async def gone(self) -> None:
        await self._agent.lost.wait()

    async def connect(self, port: int) -> socket.socket:
        return await connected(self._agent, port)

    async def pause(self) -> None:
        self._watcher.paused = True
        await self._agent.ask(PAUSE)

    async def resume(self) -> None:
        self._watcher.paused = False
        await self._agent.ask(RESUME)

    async def kill_all(self) -> None:
        await self._agent.signal_inside(-1, signal.SIGKILL)

    async def end_marked(self, run: str, *, within_s: float = 1.5) -> bool:
        try:
            async with asyncio.timeout(within_s):
                return await self.files.examine(partial(end_marked, run=run, within_s=within_s))
        except TimeoutError:
            return False

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def set_policy(self, policy: Policy) -> None:
        if self._passage is None:
            await super().set_policy(policy)
        else:
            await self._passage.change(policy)

    async def restack(self, stack: Stack) -> None:
        _require_owner(stack.upper, self._housing.owner)
        prepare(stack, self._housing.owner)
        self._settled.clear()
        try:
            async with self.files.still(), self._emptied():
                await self._lay_instead(stack)
            self._watcher.count_in(stack.upper)
        finally:
            self._settled.set()

    @asynccontextmanager
    async def _emptied(self) -> AsyncIterator[None]:
        """Keep commands out for a while, given that none runs."""
        if (await self._agent.ask(HOLD)).kind == REFUSED:
            raise WorkspaceBusy(f"something runs in sandbox {self.id}", hint="end it, or wait until it has ended")
        try:
            yield
        finally:
            await self._agent.ask(RELEASE)

    async def _lay_instead(self, stack: Stack) -> None:
        namespace = await self._agent.ask(NETWORK, MOUNTS)
        mounts = [mount for mount in self._mounts if mount.in_workspace]
        self._former.keep(os.open("workspace", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.files.root_fd))
        try:
            await lay(namespace.fd, stack, mounts, owner=self._housing.owner, instead=True)
        except SandboxLost:
            self._agent.close()
            raise
        finally:
            namespace.without_fd()

    async def admit(self) -> socket.socket:
        guest, control = await Guest.admit(self._agent)
        self._watcher.watch(guest)
        return control

    def introduction(self) -> dict[str, Any]:
        return {
            "version": 1,
            "id": self.id,
            "limits": asdict(self.limits),
            "environment": self._env,
            "owner": self.files.owner,
            "group": asdict(self._group),
        }

    @property
    def guests(self) -> int:
        return self._agent.guests

    async def alone(self) -> None:
        await self._agent.alone.wait()

    async def _stop(self) -> None:
        self._agent.close()
        if self._passage is not None:
            await self._passage.close()
        self._watcher.close()
        self._former.close()
        self.files.close()
        await self._housing.end()

    def _rlimits_for(self, command: CommandLimits) -> dict[int, tuple[int, int]]:
        wanted = rlimits(self.limits, command).items()
        return {kind: (_within(kind, soft), _within(kind, hard)) for kind, (soft, hard) in wanted}

    def _tally(self) -> tuple[int, int]:
        """Count how often something inside was ended for memory, and was refused another process."""
        group, watcher = self._group, self._watcher
        return group.memory_kills() + watcher.memory_kills, group.refused_forks() + watcher.full_houses

    def _judge(self, before: tuple[int, int], cpu_s: int | None, report: Report) -> LimitName | None:
        """Name the limit that ended a process, from what was counted since it started."""
        if report.b == 0 and report.a == 0:
            return None
        self._watcher.look_now()
        kills, refusals = self._tally()
        if kills > before[0]:
            return "memory"
        if refusals > before[1]:
            return "processes"
        if cpu_s is not None and report.b == signal.SIGKILL and report.user_us + report.system_us >= cpu_s * 1_000_000:
            return "cpu"
        # A shell ends as the command that it waited for did.
        return _LIMIT_SIGNALS.get(report.b or report.a - 128)


def passage_for(recipe: Recipe, sandbox_id: str) -> Passage | None:
    """Return the way out that a recipe asks for, not open yet."""
    if recipe.network is None:
        return None
    from skep.sandbox.egress.tls import new_authority

    return Passage(gate(), sandbox_id, recipe.network, new_authority())


async def lay_out(agent: Agent, recipe: Recipe, owner: Owner | None) -> None:
    """Mount the layers and folders of a recipe in a sandbox that has just started."""
    stack = recipe.stack if recipe.stack and recipe.stack.layers else None
    if stack or recipe.mounts:
        namespace = await agent.ask(NETWORK, MOUNTS)
        try:
            await lay(namespace.fd, stack, recipe.mounts, owner=owner)
        finally:
            namespace.without_fd()


def _require_owner(folder: str, owner: Owner | None) -> None:
    found = os.stat(folder, follow_symlinks=False)
    if (found.st_uid, found.st_gid) != (owner or (os.geteuid(), os.getegid())):
        raise InvalidRequest(
            f"the folder {folder!r} belongs to another user than its sandbox", hint="hand it over first"
        )


def _within(kind: int, value: int) -> int:
    """Lower a limit to what this process has itself: nobody can hand out more."""
    _, hard = resource.getrlimit(kind)
    return value if hard == resource.RLIM_INFINITY else min(value, hard)
