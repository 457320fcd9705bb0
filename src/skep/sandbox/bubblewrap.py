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
import resource
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from skep.errors import InvalidRequest, SandboxLost, SandboxUnusable, WorkspaceBusy
from skep.sandbox import kernels, seccomp
from skep.sandbox.agent import HOLD, NETWORK, PAUSE, REFUSED, RELEASE, RESUME, Agent, Report, Spawn
from skep.sandbox.binary import Bwrap, native
from skep.sandbox.claim import Owner, claim
from skep.sandbox.egress.gate import Passage, gate
from skep.sandbox.egress.policy import Policy
from skep.sandbox.guest import Guest
from skep.sandbox.inlet import connected
from skep.sandbox.launcher import Launcher, Plan, spare
from skep.sandbox.leftovers import sweep_once
from skep.sandbox.limits import CommandLimits, LimitName, Limits
from skep.sandbox.process import AgentProcess
from skep.sandbox.recipe import Recipe
from skep.sandbox.rootfs import Plank, network_planks, system_planks
from skep.sandbox.sandbox import Command, Process, Sandbox, Size, User
from skep.sandbox.stack import Stack, lay, prepare
from skep.sandbox.tree import Tree
from skep.sandbox.watcher import Watcher, has_processes

_READY_S = 10.0
_INSIDE_UID = 1000
#: Ask the agent for its mount namespace, not that of its network.
MOUNTS = 1

_ENVIRONMENT = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "LOGNAME": "agent",
    "PATH": "/workspace/.venv/bin:/workspace/node_modules/.bin:/usr/local/bin:/usr/bin:/bin",
    "SHELL": "/bin/bash",
    "TMPDIR": "/tmp",
    "USER": "agent",
    "XDG_CACHE_HOME": "/cache",
}
_LIMIT_SIGNALS: dict[int, LimitName] = {signal.SIGXCPU: "cpu", signal.SIGXFSZ: "disk"}
_ROOT_ENVIRONMENT = {"LOGNAME": "root", "USER": "root", "LD_PRELOAD": "/run/skep/fakeroot.so"}


class BubblewrapSandbox(Sandbox):
    """A sandbox held by bubblewrap and the native agent."""

    mechanism: ClassVar[str] = "bubblewrap"

    def __init__(
        self, recipe: Recipe, launcher: Launcher, agent: Agent, files: Tree, passage: Passage | None = None
    ) -> None:
        super().__init__()
        self.id = launcher.id
        self.limits = recipe.limits
        self.files: Tree = files
        self._env = {**_ENVIRONMENT, **(passage.environment() if passage else {}), **recipe.env}
        self._passage = passage
        self._launcher = launcher
        self._group = launcher.group
        self._agent = agent
        self._mounts = recipe.mounts
        #: Cleared while the workspace is being swapped for another.
        self._settled = asyncio.Event()
        self._settled.set()
        self._watcher = Watcher(agent, files, recipe.limits, watch_memory=launcher.group.way == "none")
        if recipe.stack is not None:
            self._watcher.count_in(recipe.stack.upper)
        self._stopping: asyncio.Task[None] | None = None
        self._rlimits = rlimits(recipe.limits, CommandLimits())

    @classmethod
    async def start_from(cls, recipe: Recipe, *, plan: Plan | None = None, spares: bool = True) -> BubblewrapSandbox:
        """Start a sandbox; it serves commands when this returns. With `spares` the next one starts faster."""
        launcher = spare().take()
        agent = Agent(launcher.control)
        passage = _passage(recipe, launcher.id)
        try:
            plan = plan or draw_plan(
                recipe,
                throwaway=launcher.record.planned_throwaway,
                certificate=passage.certificate if passage else None,
            )
            await launcher.go(agent, plan, recipe.limits)
            root = await _ready(agent, launcher)
            await _lay(agent, recipe, launcher.owner)
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
            argv=_argv(command),
            env=self._environment(user, env, terminal),
            cwd=os.path.join("/workspace", cwd or ""),
            limits=self._rlimits if limits is None else rlimits(self.limits, limits),
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
        _require_owner(stack.upper, self._launcher.owner)
        prepare(stack, self._launcher.owner)
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
        try:
            await lay(namespace.fd, stack, mounts, owner=self._launcher.owner, instead=True)
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
        self.files.close()
        await self._launcher.end()

    def _environment(self, user: User, env: Mapping[str, str] | None, terminal: Size | None) -> dict[str, str]:
        extra = {"TERM": "xterm-256color"} if terminal else {}
        return {**self._env, **extra, **(_ROOT_ENVIRONMENT if user == "root" else {}), **(env or {})}

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


def _passage(recipe: Recipe, sandbox_id: str) -> Passage | None:
    if recipe.network is None:
        return None
    from skep.sandbox.egress.tls import new_authority

    return Passage(gate(), sandbox_id, recipe.network, new_authority())


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
    for plank in (*system_planks(), *_extra_planks(recipe)):
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
            plan.add("--dir", _mount_point(mount.inside))


async def _lay(agent: Agent, recipe: Recipe, owner: Owner | None) -> None:
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


def _argv(command: Command) -> list[str]:
    argv = ["/bin/bash", "-c", command] if isinstance(command, str) else list(command)
    if not argv or not argv[0]:
        raise InvalidRequest("the command is empty", hint="give a program to run")
    return argv


def rlimits(sandbox: Limits, command: CommandLimits) -> dict[int, tuple[int, int]]:
    """Return what the kernel holds a command to, given its sandbox's limits and its own."""
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: command.file_bytes or sandbox.disk_bytes,
        resource.RLIMIT_NOFILE: command.open_files or sandbox.open_files,
        resource.RLIMIT_NPROC: command.processes or sandbox.processes,
    }
    if command.cpu_s is not None:
        wanted[resource.RLIMIT_CPU] = command.cpu_s
    if command.memory_bytes is not None:
        wanted[resource.RLIMIT_AS] = command.memory_bytes
    hard = {resource.RLIMIT_CPU: 1}  # the warning signal, then a second later the final one
    return {kind: (_within(kind, value), _within(kind, value + hard.get(kind, 0))) for kind, value in wanted.items()}


def _within(kind: int, value: int) -> int:
    """Lower a limit to what this process has itself: nobody can hand out more."""
    _, hard = resource.getrlimit(kind)
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _extra_planks(recipe: Recipe) -> list[Plank]:
    # Real paths: a link of the host, shown as a link, could lead a later mount point to a folder the agent writes.
    for host in recipe.read_only:
        if not os.path.exists(host):
            raise InvalidRequest(f"there is nothing at {host!r} to show", hint="give a path that exists on the host")
    return [Plank(Path(os.path.realpath(host)), _mount_point(inside)) for host, inside in recipe.read_only.items()]


def _mount_point(inside: str) -> str:
    # Two leading slashes survive normpath, and would hide the first folder's name.
    clean = "/" + os.path.normpath(inside).lstrip("/")
    taken = ("", "workspace", "tmp", "cache", "dev", "proc")
    if not inside.startswith("/") or clean.split("/")[1] in taken or f"{clean}/".startswith("/run/skep/"):
        raise InvalidRequest(
            f"nothing can be mounted at {inside!r}",
            hint="choose a path that the agent cannot write to, such as /opt/tools",
        )
    return clean
