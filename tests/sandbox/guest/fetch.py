"""Get what the guest needs, on Debian and Ubuntu: python -m tests.sandbox.guest.fetch

QEMU is installed (as root); a kernel and busybox are only unpacked, into a cache folder, and never become the host's.
Safe to repeat.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: A kernel package with 9p, which the smaller `cloud` one lacks.
KERNEL = "linux-image-amd64" if Path("/etc/debian_version").exists() else "linux-image-generic"
CACHES = (Path("/var/cache/skep-guest"), Path.home() / ".cache" / "skep-guest")


def kernel_folder() -> Path | None:
    """Return the folder that the packages were unpacked to, if they were."""
    for folder in CACHES:
        if (folder / "bin/busybox").exists() and any(folder.glob("boot/vmlinuz-*")):
            return folder
    return None


def main() -> int:
    if shutil.which("qemu-system-x86_64") is None:
        if os.geteuid() != 0:
            print("run: sudo apt-get install qemu-system-x86", file=sys.stderr)
            return 1
        apt("install", "-y", "-q", "--no-install-recommends", "qemu-system-x86")
    if kernel_folder() is None:
        unpack(CACHES[0] if os.geteuid() == 0 else CACHES[1])
    return 0


def unpack(cache: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="skep-fetch-") as folder:
        apt("download", kernel_package(), "busybox-static", cwd=folder)
        ready = Path(folder, "ready")
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, ready], check=True)
        ready.chmod(0o755)
        cache.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(ready, cache, symlinks=True)


def kernel_package() -> str:
    """Return the package with the kernel itself, which the general one depends on."""
    shown = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Depends: (linux-image-\d\S+)", shown)
    if found is None:
        sys.exit(f"apt knows no {KERNEL}; run apt-get update")
    return found[1]


def apt(*words: str, cwd: str | None = None) -> None:
    subprocess.run(["apt-get", *words], cwd=cwd, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
