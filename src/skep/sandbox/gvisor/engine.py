"""gVisor as a runtime of a Docker engine: the same root as a container, with the twin's streams attached to it.

The engine has to know runsc, as `runsc` or by the name in the option `runtime`, with `--network=none` among its
arguments: builds of 2022 cannot tell a network namespace from the host's on newer kernels, and refuse to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import socket
import struct
import tarfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skep.errors import SandboxUnusable, SkepError
from skep.sandbox.claim import Owner
from skep.sandbox.containers.engine import Engine
from skep.sandbox.containers.orphans import labels, sweep_once
from skep.sandbox.gvisor.bundle import Bundle, Twin, prepare
from skep.sandbox.gvisor.house import Folder, with_kernel
from skep.sandbox.link import Housing, Link
from skep.sandbox.recipe import Recipe

if TYPE_CHECKING:
    from docker import APIClient

T = TypeVar("T")

_IMAGE = "skep-gvisor"
#: What an attached stream is cut into: which one it is, and a length.
_HEAD = struct.Struct("!B3xI")
_OUTPUT = 1
_SAID_BYTES = 4096


class Attached(Link):
    """The standard streams of a container, over one socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        #: The last of what was said on standard error.
        self.said = b""

    @classmethod
    async def over(cls, connection: socket.socket) -> Attached:
        return cls(*await asyncio.open_connection(sock=connection))

    async def read(self) -> bytes:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                stream, length = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
                data = await self._reader.readexactly(length)
                if stream == _OUTPUT and data:
                    return data
                self.said = (self.said + data)[-_SAID_BYTES:]
        return b""

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


@dataclass(slots=True)
class Container(Housing):
    """A container of an engine's, held by gVisor."""

    folder: Folder
    engine: Engine
    link: Attached
    ended: bool = False

    @property
    def id(self) -> str:  # type: ignore[override]
        return self.folder.id

    @property
    def name(self) -> str:
        return _name(self.folder)

    async def alive(self) -> bool:
        return not self.ended

    async def end(self) -> None:
        if not self.ended:
            self.ended = True
            await self.link.close()
            await _remove(self.engine, self.folder)

    def complaint(self) -> str:
        """Return what the first process said on standard error."""
        return self.link.said.decode(errors="replace").strip()


async def open_container(recipe: Recipe, twin: Twin) -> Container:
    """Make a container with a program in it, and start it."""
    engine = await Engine.at(recipe.options.get("host"))
    folder = Folder.make(grouped=False)
    try:
        connection = await _finished(engine.ask(lambda api: _made(api, engine, folder, recipe, twin)))
    except BaseException:
        await _remove(engine, folder)
        raise
    container = Container(folder, engine, await Attached.over(connection))
    try:
        await _finished(engine.ask(lambda api: api.start(container.name)))
    except BaseException:
        await container.end()
        raise
    sweep_once(engine)
    return container


async def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Wait to the end even if cancelled: a thread would go on, and make what nobody knows of."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def _remove(engine: Engine, folder: Folder) -> None:
    # The container goes by itself when the twin does; this is for one that will not, or was never started.
    with contextlib.suppress(SkepError):
        await engine.ask(lambda api: api.remove_container(_name(folder), force=True, v=True))
    await asyncio.to_thread(folder.remove)


def _name(folder: Folder) -> str:
    return f"skep-{folder.id}"


def _made(api: APIClient, engine: Engine, folder: Folder, recipe: Recipe, twin: Twin) -> socket.socket:
    runtime = str(recipe.options.get("runtime") or "runsc")
    if runtime not in (api.info().get("Runtimes") or {}):
        raise SandboxUnusable(
            f"the engine at {engine.host} has no runtime {runtime!r}",
            hint=f'add "{runtime}": {{"path": "/usr/bin/runsc", "runtimeArgs": ["--network=none"]}} to its runtimes',
        )
    bundle, owner = prepare(folder.path, recipe, twin)
    api.create_container(
        _image(api, bundle.root),
        list(bundle.command),
        name=_name(folder),
        hostname="skep",
        user=f"{owner[0]}:{owner[1]}",
        working_dir="/",
        environment={"PATH": "/usr/bin:/bin"},
        stdin_open=True,
        network_disabled=True,
        labels=labels(folder.id, recipe.labels),
        host_config=_host_config(api, engine, bundle, owner, recipe) | {"Runtime": runtime},
    )
    attached = api.attach_socket(_name(folder), {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    # Taken out of the SDK's objects, which would close it when they go.
    return socket.socket(fileno=attached._sock.detach())


def _host_config(api: APIClient, engine: Engine, bundle: Bundle, owner: Owner, recipe: Recipe) -> dict[str, Any]:
    from docker.types import LogConfig, Mount, Ulimit

    limits = with_kernel(recipe.limits)
    uid, gid = owner
    rooms = {shown.destination: shown.options for shown in bundle.mounts if shown.type == "tmpfs"}
    config: dict[str, Any] = api.create_host_config(
        auto_remove=True,
        cap_drop=["ALL"],
        # What goes through the streams is the conversation, and no log.
        log_config=LogConfig(type="none"),
        mem_limit=limits.memory_bytes,
        memswap_limit=limits.memory_bytes,
        mounts=[
            Mount(inside, source, type="bind", read_only=read_only) for source, inside, read_only in bundle.shown()
        ],
        nano_cpus=int(min(limits.cpus, engine.cpus) * 1e9),
        network_mode="none",
        pids_limit=limits.processes,
        read_only=True,
        security_opt=["no-new-privileges"],
        shm_size=recipe.limits.shm_bytes,
        tmpfs={
            place: ",".join(("exec", f"uid={uid}", f"gid={gid}", *options))
            for place, options in rooms.items()
            if not place.startswith("/dev")
        },
        ulimits=[Ulimit(name="core", soft=0, hard=0)],
    )
    return config


def _image(api: APIClient, root: Path) -> str:
    """Return the image of a root without its mounts, which is made the first time."""
    data = _packed(root)
    tag = hashlib.sha256(data).hexdigest()[:32]
    if not api.images(name=f"{_IMAGE}:{tag}", quiet=True):
        api.import_image_from_data(data, repository=_IMAGE, tag=tag)
    return f"{_IMAGE}:{tag}"


def _packed(root: Path) -> bytes:
    """Pack a folder, so that the same content gives the same bytes."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(root, arcname=".", filter=plain)
    return packed.getvalue()
