"""A workspace in layers: folders of the host that a sandbox sees as one, and more folders shown in it.

What is written goes to the uppermost folder, and the others are only read, so that many workspaces share them. The
kernel's overlay does it; it is mounted in the sandbox's own namespaces by `skep-mount`, for an ordinary user too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from skep.errors import InvalidRequest, SandboxLost, SandboxUnusable, WorkspaceBusy
from skep.sandbox.binary import native
from skep.sandbox.claim import Owner
from skep.sandbox.leftovers import records_folder

#: What may be written to a scratch mount: it lies in memory.
SCRATCH_BYTES = 1 << 30
_BUSY = 16
_HALF_DONE = 3


@dataclass(frozen=True, slots=True)
class Stack:
    """Folders of the host laid over each other: the one that is written, and those below, the uppermost first."""

    upper: str
    #: An empty folder beside `upper`, for the kernel's use.
    work: str
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if os.path.dirname(self.upper) != os.path.dirname(self.work):
            raise InvalidRequest("the upper folder and its work folder are not in one folder", hint="put them together")


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of the host shown inside; what is written to `scratch` is thrown away with the sandbox."""

    host: str
    #: Absolute; below /workspace it is made if it is missing.
    inside: str
    mode: Literal["read-only", "read-write", "scratch"] = "read-only"

    def __post_init__(self) -> None:
        if not os.path.isdir(self.host):
            raise InvalidRequest(f"there is no folder {self.host!r} to show", hint="give one that exists on the host")
        parts = self.inside.split("/")
        if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]) or "\0" in self.inside:
            raise InvalidRequest(f"nothing can be shown at {self.inside!r}", hint="give an absolute, plain path")

    @property
    def in_workspace(self) -> bool:
        return self.inside.startswith("/workspace/")


@dataclass(slots=True)
class _Orders:
    """What `skep-mount` is to do, and the folders that it is handed for it when Skep is root."""

    owner: Owner | None
    words: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def lay(self, stack: Stack) -> None:
        if not stack.layers:
            self.show(Mount(stack.upper, "/workspace", "read-write"))
            return
        upper = Path(stack.upper)
        self.words += ["layers", "/workspace", self._source(str(upper.parent)), upper.name, Path(stack.work).name]
        self.words += [str(len(stack.layers)), *(self._source(layer) for layer in stack.layers)]

    def show(self, mount: Mount) -> None:
        self.words += [mount.mode, mount.inside]
        if mount.mode == "scratch":
            self.words += [str(SCRATCH_BYTES), "1"]
        self.words.append(self._source(mount.host))

    def _source(self, path: str) -> str:
        real = os.path.realpath(path)
        if self.owner is None:
            return real
        self.sources.append(real)
        return str(len(self.sources) - 1)

    def text(self, gone: str) -> bytes:
        uid = self.owner[0] if self.owner else 0
        head = [str(records_folder()), str(int(self.owner is not None)), str(uid), str(len(self.sources)), gone]
        return b"".join(os.fsencode(word) + b"\0" for word in (*head, *self.words))


async def lay(
    namespace: int,
    stack: Stack | None,
    mounts: Sequence[Mount],
    *,
    owner: Owner | None,
    instead: bool = False,
    program: Path | None = None,
) -> None:
    """Mount a stack and more folders in the mount namespace of a sandbox; `instead` of the workspace it has.

    `program` is for tests that show what `skep-mount` stops.
    """
    orders = _Orders(owner)
    if stack is not None:
        orders.lay(stack)
    for mount in mounts:
        orders.show(mount)
    program = program or native("skep-mount")
    status, said = await asyncio.to_thread(_mount, program, orders, namespace, "/workspace" if instead else "")
    if status == _HALF_DONE:
        raise SandboxLost(f"the sandbox has lost its workspace: {said}", hint="start another over the same workspace")
    if status == _BUSY:
        raise WorkspaceBusy(f"a folder of the workspace is in use: {said}", hint="end what uses it, then try again")
    if status != 0:
        raise SandboxUnusable(
            f"the workspace cannot be mounted: {said or 'it gave no reason'}",
            hint="`skep doctor` says what this machine allows, `skep workspace health` what is wrong with one",
        )


def _mount(program: Path, orders: _Orders, namespace: int, gone: str) -> tuple[int, str]:
    with ExitStack() as opened:
        fds = [_memory(orders.text(gone)), namespace, *(_folder(path) for path in orders.sources)]
        for fd in (fds[0], *fds[2:]):
            opened.callback(os.close, fd)
        complaints = os.memfd_create("complaints", os.MFD_CLOEXEC)
        opened.callback(os.close, complaints)
        pid = os.posix_spawn(program, ["skep-mount"], {}, file_actions=_actions(fds, complaints))
        _, status = os.waitpid(pid, 0)
        said = os.pread(complaints, 4096, 0).decode(errors="replace").strip()
    return os.waitstatus_to_exitcode(status), said


def _actions(fds: Sequence[int], complaints: int) -> list[tuple[int, ...]]:
    """Give the program its descriptors from 3 on. They are first moved out of each other's way."""
    aside = max((*fds, complaints, len(fds) + 3)) + 1
    moves = [(os.POSIX_SPAWN_DUP2, complaints, 2)]
    moves += [(os.POSIX_SPAWN_DUP2, fd, aside + index) for index, fd in enumerate(fds)]
    moves += [(os.POSIX_SPAWN_DUP2, aside + index, 3 + index) for index in range(len(fds))]
    return [*moves, *((os.POSIX_SPAWN_CLOSE, aside + index) for index in range(len(fds)))]


def _folder(path: str) -> int:
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(
            f"the folder {path!r} of a workspace cannot be opened: {error.strerror}", hint="skep workspace health"
        ) from error


def _memory(data: bytes) -> int:
    fd = os.memfd_create("orders", os.MFD_CLOEXEC)
    os.write(fd, data)
    return fd


def prepare(stack: Stack, owner: Owner | None) -> None:
    """Hand the folders that an overlay writes to over to the sandbox's own user, when it has one."""
    os.makedirs(stack.work, mode=0o700, exist_ok=True)
    if owner is not None:
        for folder in (os.path.dirname(stack.work), stack.work):
            os.chown(folder, *owner, follow_symlinks=False)
