"""One container of a sandbox, from its first file on the host to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import socket
import struct
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skep.errors import SandboxUnusable, SkepError
from skep.sandbox.cgroups import Group
from skep.sandbox.claim import Owner
from skep.sandbox.containers.engine import Engine
from skep.sandbox.containers.furniture import FILTER, SOCKET, Furniture
from skep.sandbox.containers.orphans import labels
from skep.sandbox.containers.profile import profile
from skep.sandbox.containers.vigil import vigil
from skep.sandbox.hierarchy import folder_of
from skep.sandbox.leftovers import Record
from skep.sandbox.recipe import Recipe

if TYPE_CHECKING:
    from skep.sandbox.agent import Agent

_START_S = 30.0
_END_S = 2.0
_LEAST_FILES = 1024
_NO_GROUP = Group("none", {})
_PEER = struct.Struct("=iII")
#: What the engine hides by itself, of whatever version; and /sys, which no sandbox has.
_MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys",
)  # fmt: skip


@dataclass(slots=True)
class Container:
    """The host's side of one container. Everything it leaves on the host is in `folder`, and in its record."""

    id: str
    engine: Engine
    record: Record
    folder: str
    owner: Owner | None = None
    group: Group = _NO_GROUP
    pidfd: int = -1

    @classmethod
    def plan(cls, engine: Engine) -> Container:
        """Name a container and make its private folder."""
        sandbox_id = secrets.token_hex(8)
        record = Record.open(sandbox_id)
        folder = f"{tempfile.gettempdir()}/skep-workspace-{sandbox_id}"
        try:
            record.note(_NO_GROUP, (folder, 0))
            os.mkdir(folder, 0o700)
            record.note(_NO_GROUP, (folder, os.stat(folder).st_ino))
        except BaseException:
            record.settle(_NO_GROUP, wait_s=0)
            raise
        return cls(sandbox_id, engine, record, folder)

    @property
    def name(self) -> str:
        """What the engine knows it by."""
        return f"skep-{self.id}"

    @property
    def user(self) -> tuple[int, int]:
        return self.owner or (os.geteuid(), os.getegid())

    async def start(self, image: str, furniture: Furniture, recipe: Recipe, runtime: str | None) -> socket.socket:
        """Make the container and start it; return the agent's connection."""
        with furniture.listen() as listener:
            await self.engine.ask(lambda api: self._make(api, image, furniture, recipe, runtime))
            with await self.engine.ask(self._attached) as complaints:
                await self.engine.ask(lambda api: api.start(self.name))
                control = await _called(listener, complaints)
        try:
            await self._recognise(control)
        except BaseException:
            control.close()
            raise
        return control

    def _make(self, api: Any, image: str, furniture: Furniture, recipe: Recipe, runtime: str | None) -> None:
        api.create_container(
            image,
            entrypoint=["/run/skep/agent"],
            command=["call", SOCKET, FILTER],
            name=self.name,
            hostname="skep",
            user="{}:{}".format(*self.user),
            working_dir="/",
            labels=labels(self.id, recipe.labels),
            stop_signal="SIGKILL",
            healthcheck={"test": ["NONE"]},
            host_config=self._host_config(api, furniture, recipe, runtime),
        )

    def _host_config(self, api: Any, furniture: Furniture, recipe: Recipe, runtime: str | None) -> dict[str, Any]:
        limits, (uid, gid) = recipe.limits, self.user
        config: dict[str, Any] = api.create_host_config(
            auto_remove=True,
            cap_drop=["ALL"],
            init=False,
            ipc_mode="private",
            log_config={"Type": "none"},
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,
            mounts=list(furniture.mounts.values()),
            nano_cpus=int(max(0.01, min(limits.cpus, self.engine.cpus)) * 1e9),
            network_mode="none",
            pids_limit=limits.processes,
            read_only=True,
            restart_policy={"Name": "no"},
            runtime=runtime,
            security_opt=["no-new-privileges", f"seccomp={profile()}", *self._labelling()],
            shm_size=limits.shm_bytes,
            tmpfs={
                "/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={limits.tmp_bytes}",
                "/cache": f"rw,exec,nosuid,nodev,mode=0755,uid={uid},gid={gid},size={limits.cache_bytes}",
            },
            ulimits=[
                # The agent sets each command's own; the runtime and the agent need some themselves.
                {"Name": "nofile", "Soft": (most := max(limits.open_files, _LEAST_FILES)), "Hard": most},
                {"Name": "core", "Soft": 0, "Hard": 0},
            ],
            userns_mode="host",  # where the engine maps users, the workspace's would be nobody inside
        )
        return config | {"MaskedPaths": list(_MASKED)}

    def _labelling(self) -> list[str]:
        # The files shown inside are the host's and keep its labels, which SELinux lets no container read.
        return ["label=disable"] if any("name=selinux" in option for option in self.engine.options) else []

    def _attached(self, api: Any) -> socket.socket:
        """Listen to what the agent complains of before it serves; the engine keeps no log of it."""
        stream = api.attach_socket(self.name, {"stdout": 1, "stderr": 1, "stream": 1})
        complaints = socket.socket(fileno=os.dup(stream.fileno()))
        with contextlib.suppress(OSError):
            stream._response.close()  # or the SDK leaves its socket to the garbage collector
        complaints.setblocking(False)
        return complaints

    async def _recognise(self, control: socket.socket) -> None:
        """Make sure that it was the container which called, and take hold of its first process."""
        found = await self.engine.ask(lambda api: api.inspect_container(self.name))
        pid, _, _ = _PEER.unpack(control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if not found["State"]["Pid"]:
            raise SandboxUnusable("the container ended as soon as it had started", hint="look into the engine's log")
        if pid != found["State"]["Pid"]:
            raise SandboxUnusable(
                f"the engine at {self.engine.host} numbers processes as this process does not",
                hint="run Skep where the engine runs, not in a container that only has its socket",
            )
        with contextlib.suppress(ProcessLookupError):  # it has just gone, which its socket says too
            self.pidfd = os.pidfd_open(pid)
        self.group = _group_of(pid)

    async def watch_engine(self, agent: Agent) -> None:
        """End the conversation with the agent when the engine has gone."""
        loop = asyncio.get_running_loop()

        def told() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed, and everything with it
                loop.call_soon_threadsafe(agent.close, "its engine has gone")

        await self.engine.ask(lambda _: vigil(self.engine).attend(self.id, told))

    async def end(self) -> None:
        """Wait until everything inside is gone, by force if need be; the engine then removes the container itself."""
        await asyncio.to_thread(self._end_now)

    def _end_now(self) -> None:
        vigil(self.engine).leave(self.id)
        ended = self.pidfd >= 0 and _has_ended(self.pidfd, _END_S)
        if not ended:
            with contextlib.suppress(SkepError):  # it was never made, or the engine has gone and removes it when back
                self.engine.ask_now(lambda api: api.remove_container(self.name, force=True, v=True))
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.record.settle(_NO_GROUP, wait_s=0)


async def _called(listener: socket.socket, complaints: socket.socket) -> socket.socket:
    """Wait for the one call, or for the container's end."""
    loop = asyncio.get_running_loop()
    calling = asyncio.ensure_future(loop.sock_accept(listener))
    complaining = asyncio.ensure_future(_heard(complaints))
    try:
        await asyncio.wait((calling, complaining), timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if calling.done():
            return calling.result()[0]
    finally:
        calling.cancel()
        complaining.cancel()
    said = complaining.result() if complaining.done() else f"nobody called within {_START_S:.0f} s"
    raise SandboxUnusable(
        f"the container did not start: {said or 'it gave no reason'}",
        hint="look into the engine's log; a runtime with a kernel of its own needs the mechanism gvisor",
    )


async def _heard(complaints: socket.socket) -> str:
    """Return what was said on both streams until the container ended; each piece has a head of 8 bytes."""
    said = b""
    while len(said) < 4096 and (piece := await asyncio.get_running_loop().sock_recv(complaints, 4096)):
        said += piece
    text, at = b"", 0
    while at + 8 <= len(said):
        size = int.from_bytes(said[at + 4 : at + 8], "big")
        text += said[at + 8 : at + 8 + size]
        at += 8 + size
    return text.decode(errors="replace").strip()


def _group_of(pid: int) -> Group:
    """Find where the kernel counts what it ends or refuses for the container's limits."""
    unified = folder_of(pid, "")
    if unified is not None and (unified / "memory.events").exists():
        return Group("v2", {"": (str(unified), 0)})
    folders = {controller: folder_of(pid, controller) for controller in ("memory", "pids")}
    if all(folders.values()):
        return Group("v1", {controller: (str(folder), 0) for controller, folder in folders.items()})
    return _NO_GROUP


def _has_ended(pidfd: int, wait_s: float) -> bool:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(wait_s * 1000))
