"""What the kernel itself shows of a stack of folders: mounts it in namespaces of its own and describes it.

Run inside as `python kernel_view.py FOLDER LAYER…`: mounts the layers at the folder and prints what is seen as JSON.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

View = dict[str, list[object]]


def kernel_view(place: Path, layers: Sequence[str]) -> View:
    """Mount a stack in a user namespace and return what it shows, by path."""
    mountpoint, empty = place / "mnt", place / "empty"
    mountpoint.mkdir(exist_ok=True)
    empty.mkdir(exist_ok=True)
    # The kernel wants two layers at least where nothing is written.
    command = ["unshare", "-Urm", sys.executable, "-IS", __file__, str(mountpoint), *layers, str(empty)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    view: View = json.loads(done.stdout)
    return view


def describe(top: str) -> View:
    """Describe a folder tree by the kinds, modes and contents in it."""
    view: View = {}
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            path = Path(folder, name)
            view[str(path.relative_to(top))] = _describe(path)
    return view


def _describe(path: Path) -> list[object]:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return ["phantom"]
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISREG(found.st_mode):
        return ["file", mode, hashlib.sha256(path.read_bytes()).hexdigest()]
    if stat.S_ISLNK(found.st_mode):
        return ["link", str(path.readlink())]
    return ["folder", mode] if stat.S_ISDIR(found.st_mode) else ["other", found.st_mode]


def main() -> None:
    mountpoint, *layers = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    options = "userxattr,lowerdir=" + ":".join(layers)
    if libc.mount(b"overlay", os.fsencode(mountpoint), b"overlay", 0, os.fsencode(options)) != 0:
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    print(json.dumps(describe(mountpoint)))


if __name__ == "__main__":
    main()
