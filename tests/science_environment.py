"""Make, once per machine, an environment with numpy, pandas and matplotlib for the system's Python; print where it is.

A sandbox sees the system's programs and no others, so the environment is built on those. It is kept in the folder for
temporary files under a name that changes with what it is made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHON = "/usr/bin/python3"
REQUIREMENTS = Path(__file__).with_name("science-requirements.txt")


def main() -> None:
    version = subprocess.run([PYTHON, "--version"], capture_output=True, text=True, check=True).stdout
    made_from = hashlib.sha256(version.encode() + REQUIREMENTS.read_bytes()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"skep-science-{made_from}"
    if not usable(place):
        place = place.with_name(f"{place.name}-{os.getuid()}")
    with place.with_name(f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            build(place)
    print(place)


def usable(place: Path) -> bool:
    """Say whether a folder there is, or may become, one that nobody else could have prepared for us."""
    lock = place.with_name(f"{place.name}.lock")
    owners = {found.lstat().st_uid for found in (place, lock) if found.exists() or found.is_symlink()}
    return owners <= {os.getuid()} or (owners == {0} and place.exists() and os.access(lock, os.W_OK))


def build(place: Path) -> None:
    draft = place.with_name(f"{place.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(draft)], check=True, stdout=sys.stderr)
    pip = [sys.executable, "-m", "pip", "--python", str(draft / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--compile", "-r", str(REQUIREMENTS)], check=True, stdout=sys.stderr)
    # Where it lies does not matter to it: the links lead to the system's Python, and paths are found from there.
    draft.rename(place)


if __name__ == "__main__":
    main()
