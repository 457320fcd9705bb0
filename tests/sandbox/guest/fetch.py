"""Get what the guest needs, on Debian: python -m tests.sandbox.guest.fetch

QEMU is installed (as root); a kernel and busybox are only unpacked, into a cache folder, and never become the host's.
Safe to repeat. Elsewhere: install QEMU, and unpack Debian's packages of the two into ~/.cache/skep-guest by hand.
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
KERNEL = "linux-image-amd64"
CACHES = (Path("/var/cache/skep-guest"), Path.home() / ".cache" / "skep-guest")


def kernel_folder() -> Path | None:
    """Return the folder that the packages were unpacked to, if they were."""
    for folder in CACHES:
        if (folder / "bin/busybox").exists() and any(folder.glob("boot/vmlinuz-*")):
            return folder
    return None


def main() -> int:
    if shutil.which("apt-get") is None:
        return refuse("there is no apt-get here; the top of this file says what to do by hand")
    if shutil.which("qemu-system-x86_64") is None:
        if os.geteuid() != 0:
            return refuse("QEMU is missing; run: sudo apt-get install qemu-system-x86")
        apt("install", "-y", "-q", "--no-install-recommends", "qemu-system-x86")
    if kernel_folder() is None:
        unpack(CACHES[0] if os.geteuid() == 0 else CACHES[1])
    return 0


def refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


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
    shown = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True).stdout
    found = re.search(r"Depends: (linux-image-\d\S+)", shown)
    if found is None:
        sys.exit(f"apt knows no {KERNEL}; run: sudo apt-get update")
    return found[1]


def apt(*words: str, cwd: str | None = None) -> None:
    """Run apt-get; once more with a fresh list of packages if the old one no longer serves."""
    command = ["apt-get", *words]
    if subprocess.run(command, cwd=cwd, stdout=sys.stderr).returncode != 0:
        subprocess.run(["apt-get", "-q", "update"], stdout=sys.stderr)
        subprocess.run(command, cwd=cwd, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
