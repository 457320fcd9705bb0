"""What runsc is given: a root file system of pieces of the host, and config.json, which says how to run in it.

The pieces that never change lie in the root, which gVisor may cache. What the host and the inside both see change (the
workspace, folders shown besides) is mounted apart, and asked for anew each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from skep.errors import InvalidRequest, SandboxUnusable
from skep.sandbox import kernels
from skep.sandbox.binary import native
from skep.sandbox.claim import Owner, claim
from skep.sandbox.gvisor.config import Config, First, Shown
from skep.sandbox.leftovers import records_folder
from skep.sandbox.recipe import Recipe
from skep.sandbox.rootfs import Plank, extra_planks, system_planks

_INSIDE_UID = 1000
#: Made fresh inside, so nothing of a root file system is shown there.
_FRESH = ("cache", "dev", "proc", "run", "sys", "tmp", "workspace")
_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
#: The folder of devices can be written to, like that of a container.
_DEVICES_BYTES = 1 << 20
_STATX = "/run/skep/statx.so"


class Bind(NamedTuple):
    """A folder or file of the host, where `launch` mounts it, and where that is inside."""

    source: str
    target: str
    inside: str
    read_only: bool = True
    #: What the source must be; 0 where it does not matter which folder its path leads to.
    inode: int = 0


@dataclass(frozen=True, slots=True)
class Twin:
    """The program that serves inside, and what it is told."""

    program: bytes
    arguments: tuple[str, ...] = ()


@dataclass(slots=True)
class Bundle:
    """A folder with a root file system that is complete once `binds` are mounted."""

    folder: Path
    #: Where runsc finds the folder, whose own path may lead through others that only root can walk.
    seen: Path
    binds: list[Bind] = field(default_factory=list)
    mounts: list[Shown] = field(default_factory=list)
    command: tuple[str, ...] = ()

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def lay(self, plank: Plank) -> None:
        """Put one piece into the root: small things as copies, folders by a mount to come."""
        target = self._place(plank.inside)
        match plank.source:
            case bytes(data):
                _write(target, data)
            case str(text):
                _write(target, text.encode())
            case Path() as path if path.is_symlink():
                target.symlink_to(os.readlink(path))
            case Path() as path if path.is_dir():
                target.mkdir()
                self.binds.append(Bind(str(path), str(target), plank.inside))
            case Path() as path:
                _write(target, path.read_bytes())

    def bind(self, source: Path, inside: str) -> None:
        """Put a file that is run into the root: a copy might lie where nothing may be run."""
        target = self._place(inside)
        target.touch()
        self.binds.append(Bind(str(source), str(target), inside))

    def show(self, source: str, inside: str, *, read_only: bool = True, inode: int = 0) -> None:
        """Mount a file or folder of the host apart from the root, so that its changes are seen."""
        point = self._place(inside)
        if any(point.is_relative_to(bind.target) for bind in self.binds[1:]):
            raise InvalidRequest(
                f"nothing can be mounted at {inside!r}, which lies in a folder of the system",
                hint="choose a path of its own, such as /opt/tools",
            )
        through = self.folder / "shown" / str(len(self.mounts))
        through.parent.mkdir(exist_ok=True)
        for place in (through, point):
            _make_like(source, place)
        self.binds.append(Bind(source, str(through), inside, read_only, inode))
        self.mounts.append(Shown.folder(f"{self.seen}/shown/{through.name}", inside, read_only=read_only))

    def room(self, inside: str, size_bytes: int, mode: str) -> None:
        """Give it a place in memory, of a size."""
        self._place(inside).mkdir(exist_ok=True)
        self.mounts.append(Shown.memory(inside, f"size={size_bytes}", f"mode={mode}"))

    def shown(self) -> Iterator[tuple[str, str, bool]]:
        """Tell what of the host is where inside, and whether it is read-only."""
        return ((bind.source, bind.inside, bind.read_only) for bind in self.binds[1:])

    def write(self) -> None:
        """Write config.json."""
        config = Config(process=First(args=self.command), mounts=tuple(self.mounts))
        _write(self.folder / "config.json", config.text())

    def _place(self, inside: str) -> Path:
        target = self.root / inside.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


def prepare(folder: Path, recipe: Recipe, twin: Twin) -> tuple[Bundle, Owner]:
    """Put together what a sandbox sees; return it with the host's user whose the workspace is."""
    workspace = recipe.stack.upper if recipe.stack else recipe.folder or str(folder / "workspace")
    fd, owner = claim(workspace, adopt=recipe.adopt)
    try:
        inode = os.fstat(fd).st_ino
    finally:
        os.close(fd)
    return furnish(folder, recipe, (workspace, inode), twin), owner or (os.geteuid(), os.getegid())


def furnish(folder: Path, recipe: Recipe, workspace: tuple[str, int], twin: Twin) -> Bundle:
    """Put together what a sandbox sees, in a folder. `workspace` is what /workspace shows, by its path and inode."""
    bundle = Bundle(folder, records_folder() if os.geteuid() == 0 else folder)
    bundle.root.mkdir(mode=0o755)
    bundle.binds.append(Bind(str(bundle.root), str(bundle.root), "/"))  # first of all, and read-only
    rootfs = recipe.options.get("rootfs")
    for plank in system_planks() if rootfs is None else planks_of(Path(rootfs)):
        bundle.lay(plank)
    for inside, content in _brought(twin).items():
        bundle.lay(Plank(content, inside))
    bundle.lay(Plank(Path(kernels.FOLDER), kernels.INSIDE))
    bundle.bind(native("skep-fakeroot.so"), "/run/skep/fakeroot.so")
    bundle.bind(native("skep-statx.so"), _STATX)
    _mount(bundle, recipe, workspace)
    entry = ("-I", "-S", "-u", "/run/skep/entry.py", str(_INSIDE_UID), "/run/skep/twin.py")
    bundle.command = (_python(bundle), *entry, *twin.arguments)
    return bundle


def planks_of(rootfs: Path) -> Iterator[Plank]:
    """Take a whole root file system apart, so that what differs for Skep can lie between its pieces."""
    if not rootfs.is_dir():
        raise InvalidRequest(f"there is no root file system at {str(rootfs)!r}", hint="give a folder in options.rootfs")
    ours = {plank.inside: plank for plank in system_planks() if isinstance(plank.source, str)}
    for path in sorted(rootfs.iterdir()):
        if path.name == "etc":
            settings = (Plank(entry, f"/etc/{entry.name}") for entry in sorted(path.iterdir()) if _readable(entry))
            yield from (plank for plank in settings if plank.inside not in ours)
        elif path.name not in _FRESH and (path.is_dir() or path.is_symlink()):
            yield Plank(path, f"/{path.name}")
    yield from ours.values()


def _readable(entry: Path) -> bool:
    """Leave out what the root file system itself shows to nobody but its root, and what Skep writes."""
    return entry.name != "ld.so.preload" and (entry.is_symlink() or bool(entry.lstat().st_mode & 0o004))


def _mount(bundle: Bundle, recipe: Recipe, workspace: tuple[str, int]) -> None:
    for name in ("proc", "sys"):
        (bundle.root / name).mkdir()
    bundle.mounts.append(Shown(destination="/proc", type="proc", source="proc"))
    (bundle.root / "dev").mkdir()
    bundle.mounts.append(Shown.memory("/dev", f"size={_DEVICES_BYTES}", "mode=0755"))
    bundle.room("/dev/shm", recipe.limits.shm_bytes, "1777")
    bundle.room("/tmp", recipe.limits.tmp_bytes, "1777")
    bundle.room("/cache", recipe.limits.cache_bytes, "0755")
    folder, inode = workspace
    bundle.show(folder, "/workspace", read_only=False, inode=inode)
    for plank in extra_planks(recipe.read_only):
        bundle.show(str(plank.source), plank.inside)


def _brought(twin: Twin) -> Mapping[str, bytes]:
    return {
        "/run/skep/twin.py": twin.program,
        "/run/skep/entry.py": Path(__file__).with_name("entry.py").read_bytes(),
        "/etc/ld.so.preload": f"{_STATX}\n".encode(),
    }


def _python(bundle: Bundle) -> str:
    """Return the interpreter that the twin runs with: the system's own, since a user's may lie out of reach."""
    for python in _PYTHONS:
        place = bundle.root / python.lstrip("/")
        for bind in bundle.binds[1:]:
            if place.is_relative_to(bind.target) and os.path.lexists(bind.source / place.relative_to(bind.target)):
                return python
    raise SandboxUnusable(
        "there is no Python in the sandbox for the part of Skep that runs in it",
        hint="install python3 (3.9 or newer) with the system's packages, or into the root file system",
    )


def _make_like(source: str, place: Path) -> None:
    """Make something that the source can be mounted on."""
    if os.path.isdir(source):
        place.mkdir(exist_ok=True)
    else:
        place.touch()


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o444)
