"""Build Skep's small native programs when the package is built or installed from source.

The machine's own C compiler is used where there is one; otherwise the `ziglang` package brings one along, so nothing
but pip is needed.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ZIG = "ziglang==0.17.0"
_SOURCES = Path("src/skep/sandbox/native")
_BUILT = Path("src/skep/sandbox/bin")
_PROGRAMS = {
    "skep-agent": ("agent.c", ("-static",)),
    "skep-mount": ("mount.c", ("-static",)),
    "skep-fakeroot.so": ("fakeroot.c", ("-shared", "-fPIC", "-nostdlib", "-fno-builtin")),
    "skep-statx.so": ("statx.c", ("-shared", "-fPIC", "-nostdlib", "-fno-builtin")),
}
_FLAGS = ("-O2", "-Wall", "-Wextra", "-s")


class NativeBuildHook(BuildHookInterface[Any]):
    """Compile what is missing or older than its source, and put it into the wheel."""

    def dependencies(self) -> list[str]:
        return [] if self.target_name == "sdist" or _system_compiler() else [_ZIG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "sdist":
            return
        root = Path(self.root)
        (root / _BUILT).mkdir(exist_ok=True)
        for name, (source, flags) in _PROGRAMS.items():
            target = root / _BUILT / name
            if not _fresh(target, root / _SOURCES / source):
                _compile(root / _SOURCES / source, target, flags)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
        build_data["artifacts"].append(f"{_BUILT}/*")


def _system_compiler() -> list[str] | None:
    """Return the machine's compiler if it can link statically, which needs the C library's own package."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            probe = subprocess.run(
                [path, "-static", "-x", "c", "-", "-o", "/dev/null"], input=b"int main(void){return 0;}",
                capture_output=True, check=False,
            )  # fmt: skip
            if probe.returncode == 0:
                return [path]
    return None


def _compiler() -> list[str]:
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-musl"]
    return _system_compiler() or zig


def _compile(source: Path, target: Path, flags: tuple[str, ...]) -> None:
    # Beside the target first: a program that is running cannot be overwritten, only replaced.
    draft = target.with_suffix(".new")
    subprocess.run([*_compiler(), *_FLAGS, *flags, "-o", str(draft), str(source)], check=True)
    draft.replace(target)


def _fresh(target: Path, source: Path) -> bool:
    return target.exists() and target.stat().st_mtime >= source.stat().st_mtime
