"""What a container is shown: the host's programs or none of them, the workspace, and the few files that Skep makes up.

Everything is bound before the container starts, by the engine, from paths of the host; what is made up lies in a
private folder of the sandbox's.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skep.sandbox import kernels, seccomp
from skep.sandbox.binary import native
from skep.sandbox.recipe import Recipe
from skep.sandbox.rootfs import Plank, extra_planks, mount_point, network_planks, system_planks, users

CALL = "/run/skep/call"
SOCKET = f"{CALL}/control"
FILTER = "/run/skep/filter"
#: Files that the engine would make up itself, after the host's.
_OF_THE_ENGINE = {
    "/etc/hosts": "127.0.0.1 localhost skep\n::1 localhost\n",
    "/etc/hostname": "skep\n",
    "/etc/resolv.conf": "",
}


@dataclass(slots=True)
class Furniture:
    """The mounts for one container, and the links that its image has to have."""

    folder: str
    mounts: dict[str, dict[str, Any]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    _written: int = 0

    def show(self, source: str, inside: str, *, read_only: bool = True) -> None:
        """Bind something of the host; what comes last at a place is there."""
        self.mounts[inside] = {
            "Type": "bind",
            "Source": source,
            "Target": inside,
            "ReadOnly": read_only,
            "BindOptions": {"Propagation": "rprivate"},
        }

    def write(self, data: bytes | str, inside: str) -> None:
        """Show a file that is made up."""
        self._written += 1
        path = f"{self.folder}/{self._written}-{os.path.basename(inside)}"
        with open(path, "xb", opener=_readable) as file:
            file.write(data.encode() if isinstance(data, str) else data)
        self.show(path, inside)

    def lay(self, plank: Plank) -> None:
        match plank.source:
            case bytes(data) | str(data):
                self.write(data, plank.inside)
            case Path() as path if path.is_symlink():
                self.links[plank.inside] = os.readlink(path)
            case Path() as path:
                self.show(str(path), plank.inside)

    def listen(self) -> socket.socket:
        """Open the socket on which the agent calls, in a folder of its own that is shown inside."""
        folder = f"{self.folder}/call"
        os.mkdir(folder)
        os.chmod(folder, 0o755)  # noqa: S103 - the folder above is private, so only the container comes this far
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # By descriptor: a socket's address has room for 107 characters, and temporary folders may be deep.
                listener.bind(f"/proc/self/fd/{at}/control")
            finally:
                os.close(at)
            os.chmod(f"{folder}/control", 0o666)  # noqa: S103
            listener.listen(1)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self.show(folder, CALL)
        return listener


def furnish(
    folder: str, recipe: Recipe, *, user: tuple[int, int], workspace: str, bare: bool, certificate: bytes | None
) -> Furniture:
    """Decide what a container is shown; `bare` is one whose programs are the host's."""
    furniture = Furniture(folder)
    planks = [Plank(text, path) for path, text in (users(*user) | _OF_THE_ENGINE).items()]
    planks = [*(system_planks() if bare else ()), *planks, *extra_planks(recipe.read_only)]
    planks += network_planks(certificate) if certificate is not None else []
    for plank in planks:
        furniture.lay(plank)
    furniture.show(str(native("skep-agent")), "/run/skep/agent")
    furniture.show(str(native("skep-fakeroot.so")), "/run/skep/fakeroot.so")
    furniture.show(kernels.FOLDER, kernels.INSIDE)
    furniture.write(seccomp.assemble(), FILTER)
    if recipe.stack is None or not recipe.stack.layers:
        furniture.show(workspace, "/workspace", read_only=False)
    for mount in recipe.mounts:
        if not mount.in_workspace:
            _mount_point(furniture, mount.inside)
    return furniture


def _mount_point(furniture: Furniture, inside: str) -> None:
    """Have an empty folder where another is mounted later: the root cannot be written then."""
    empty = f"{furniture.folder}/empty"
    os.makedirs(empty, 0o755, exist_ok=True)
    furniture.show(empty, mount_point(inside))


def _readable(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o644)
    return fd
