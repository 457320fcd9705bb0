"""Make the first file system of the guest: busybox, a few kernel modules and the script `init`.

A kernel unpacks it from memory: a gzip of a `newc` archive, which is short enough to write without cpio(1).
"""

from __future__ import annotations

import gzip
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

#: What the guest needs besides what is built into Debian's kernel: virtio, 9p to see the host, overlay for /etc.
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
_FOLDERS = ("bin", "dev", "proc", "sys", "modules", "host", "root")


def build(kernel: Path, *, scripts: Mapping[str, str]) -> bytes:
    """Return the compressed archive; `kernel` is a folder with what its packages unpacked, `scripts` go to /."""
    entries = [(name, stat.S_IFDIR | 0o755, b"") for name in _FOLDERS]
    entries.append(("bin/busybox", stat.S_IFREG | 0o755, (kernel / "bin/busybox").read_bytes()))
    entries.append(("bin/sh", stat.S_IFLNK | 0o777, b"busybox"))
    for number, module in enumerate(_in_order(kernel)):
        entries.append((f"modules/{number:02}-{module.name}", stat.S_IFREG | 0o644, module.read_bytes()))
    entries += [(name, stat.S_IFREG | 0o755, text.encode()) for name, text in scripts.items()]
    return gzip.compress(b"".join(_archive(entries)), compresslevel=1)


def _in_order(kernel: Path) -> list[Path]:
    """Return the modules and all they depend on, each after those it needs."""
    files = {path.stem.replace("-", "_"): path for path in kernel.glob("lib/modules/*/kernel/**/*.ko")}
    order: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in order or name not in files:  # what has no file is built in
            return
        for needed in _depends(files[name]):
            add(needed)
        order[name] = files[name]

    for name in MODULES:
        add(name)
    return list(order.values())


def _depends(module: Path) -> list[str]:
    found = re.search(rb"\0depends=([^\0]*)\0", module.read_bytes())
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name] if found else []


def _archive(entries: list[tuple[str, int, bytes]]) -> Iterator[bytes]:
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        yield _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
