"""A world that can be thrown away, and what became of `local`'s promises in it: python -m tests.contracts.world

It is made with bubblewrap: a root that nobody writes, processes, memory and network of its own, an ordinary user.
Prints pytest's report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skep.sandbox.binary import Bwrap

ROOT = Path(__file__).parent.parent.parent
SUITE = f"{Path(__file__).with_name('test_local.py')}::TestLocal"
MARK = "SKEP_DISPOSABLE_WORLD"


def disposable() -> bool:
    """Say whether nothing here can be harmed."""
    sealed = all(os.statvfs(place).f_flag & os.ST_RDONLY for place in ("/", "/etc", str(ROOT)))
    first = Path("/proc/1/comm").read_text().strip()
    networks = [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    own = first == "bwrap" and networks == ["lo"] and os.getuid() != 0
    return os.environ.get(MARK) == "1" and sealed and own


@contextmanager
def world() -> Iterator[tuple[Path, list[str]]]:
    """Make a folder that is /tmp in the world, and give what to put before a command to run it there."""
    folder = Path(tempfile.mkdtemp(prefix="skep-world-", dir="/tmp"))
    folder.chmod(0o1777)
    try:
        yield folder, [
            sys.executable, str(ROOT / "scripts/as-user"), str(Bwrap.find().path),
            "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run", "--bind", str(folder), "/tmp",
            "--ro-bind", str(ROOT), str(ROOT),  # it may lie below /tmp
            "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin",
            "--setenv", "HOME", "/tmp", "--setenv", "PYTHONDONTWRITEBYTECODE", "1", "--setenv", MARK, "1",
            "--chdir", str(ROOT), "--",
        ]  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run the suite in one process: it runs beside other tests, and nobody waits for it."""
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", "--junitxml", "/tmp/report.xml", SUITE]
    with world() as (folder, enter):
        command = [*enter, sys.executable, "-m", "pytest", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report = folder / "report.xml"
        if not report.exists():
            sys.exit(done.stdout[-5000:] + done.stderr[-5000:])
        print(report.read_text())


if __name__ == "__main__":
    main()
