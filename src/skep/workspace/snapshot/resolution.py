"""Which versions of which packages were chosen, down to the files, before anything is installed."""

from __future__ import annotations

import json
import platform
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skep.errors import PackageRefused

_FOLDER = "node_modules/"
#: A line that asks for one release by its hashes, and for nothing else: a flag in it would be obeyed.
_LINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*(?: --hash=[a-z0-9]+:[0-9a-f]+)*")
#: What npm calls processors that the kernel calls otherwise.
_CPUS = {
    "x86_64": "x64", "aarch64": "arm64", "armv7l": "arm", "i686": "ia32", "ppc64le": "ppc64", "loongarch64": "loong64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Artifact:
    """One chosen release of a Python package, with the hashes of the files that will do."""

    name: str
    version: str
    hashes: tuple[str, ...]
    #: There is only its source: installing it runs its own code.
    needs_build: bool = False

    def requirement(self) -> str:
        return " ".join([f"{self.name}=={self.version}", *(f"--hash={digest}" for digest in self.hashes)])


@dataclass(frozen=True, slots=True)
class Resolution:
    """Everything that was chosen: Python packages, and npm's lock of the packages for JavaScript."""

    python: tuple[Artifact, ...] = ()
    node_lock: bytes = b""
    #: The Node that comes with the packages, when this machine has none that fits.
    node: Artifact | None = None

    @property
    def python_packages(self) -> dict[str, str]:
        return {artifact.name: artifact.version for artifact in self.python}

    @property
    def node_packages(self) -> dict[str, str]:
        """The packages that a program in the workspace finds by name; those below others are left out."""
        found = {path.removeprefix(_FOLDER): entry for path, entry in _entries(self.node_lock).items()}
        return {name: str(entry["version"]) for name, entry in found.items() if _FOLDER not in name}

    def content(self) -> dict[str, Any]:
        """Return what decides the content, and not where it came from."""
        node = {path: [entry["version"], entry.get("integrity")] for path, entry in _entries(self.node_lock).items()}
        python = {one.name: [one.version, *one.hashes] for one in self.python}
        return {"python": python, "node": node, "runtime": self.node.hashes if self.node else None}

    def node_files(self) -> tuple[str, ...]:
        """Return the addresses of the archives that npm will want."""
        addresses = {str(entry["resolved"]) for entry in _entries(self.node_lock).values() if "resolved" in entry}
        return tuple(sorted(addresses))


def read_pylock(text: str) -> tuple[Artifact, ...]:
    """Read what uv has chosen (PEP 751). Code of a package may have run beside uv, so nothing is taken on trust."""
    try:
        return tuple(_artifact(entry) for entry in tomllib.loads(text).get("packages", ()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackageRefused("what was chosen cannot be read", hint="the log shows what was printed") from error


def requirements(artifacts: tuple[Artifact, ...]) -> bytes:
    """Write packages as the lines that uv installs them by, exactly these files and no others."""
    return "".join(f"{artifact.requirement()}\n" for artifact in artifacts).encode()


def _artifact(entry: Mapping[str, Any]) -> Artifact:
    wheels = entry.get("wheels", [])
    files = wheels or [entry[kind] for kind in ("sdist",) if kind in entry]
    if not files:
        raise PackageRefused(f"{entry.get('name')} is not on the package index", hint="ask for packages by name")
    hashes = [f"{kind}:{digest}" for file in files for kind, digest in file.get("hashes", {}).items()]
    found = Artifact(str(entry["name"]), str(entry["version"]), tuple(hashes), needs_build=not wheels)
    if _LINE.fullmatch(found.requirement()) is None:
        raise PackageRefused(f"{found.name[:60]!a} is not a package that can be asked for", hint="leave it out")
    return found


def _entries(lock: bytes) -> dict[str, dict[str, Any]]:
    """Return the packages of npm's lock by the folder they go to."""
    if not lock:
        return {}
    try:
        packages: dict[str, dict[str, Any]] = dict(json.loads(lock)["packages"])
    except (ValueError, KeyError, TypeError) as error:
        raise PackageRefused("npm's lock cannot be read", hint="the log shows what was printed") from error
    for path, entry in packages.items():
        if path and not str(entry.get("resolved", "http")).startswith("http"):
            raise PackageRefused(
                f"{path.rpartition(_FOLDER)[2]} does not come from the registry", hint="ask for packages by name"
            )
    return {path: entry for path, entry in packages.items() if path and not entry.get("link") and _fits(entry)}


def _fits(entry: Mapping[str, Any]) -> bool:
    """Say whether npm installs a package on this machine: a lock names those for all others as well."""
    here = {"os": sys.platform, "cpu": _node_cpu(), "libc": platform.libc_ver()[0] or "musl"}
    return not entry.get("optional") or all(_admits(entry.get(field), value) for field, value in here.items())


def _admits(wanted: Sequence[str] | None, value: str) -> bool:
    if not wanted or wanted == ["any"]:
        return True
    named = [one for one in wanted if not one.startswith("!")]
    return f"!{value}" not in wanted and (value in named or not named)


def _node_cpu() -> str:
    machine = platform.machine()
    return _CPUS.get(machine, machine)
