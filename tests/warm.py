"""A `skep` that has everything loaded: a process that forks for each command, `python -m tests.warm SOCKET`.

To load Skep takes most of the time of a short command. `warm` gives a folder with a program `skep` in it, which hands
its words, folder, environment and open streams to that process, and ends as the fork does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

START_S = 60.0
PR_SET_PDEATHSIG = 1
#: What commands load late.
LATE = (
    "aiosqlite", "alembic.command", "dbos", "rich.table", "skep.app.computer", "skep.app.engine", "skep.app.remote",
    "skep.cli.following", "skep.cli.run", "skep.models.rehearsal", "skep.sandbox.bubblewrap", "skep.tasks.acting",
    "skep.tasks.supervise", "skep.workspace.archiving", "skep.workspace.snapshot.build", "skep.workspace.workspaces",
    "sqlalchemy.dialects.sqlite.aiosqlite", "sqlalchemy.ext.asyncio",
)  # fmt: skip

_PROGRAM = """\
#!{python} -IS
import json, os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect({socket!r})
asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(door, [len(asked).to_bytes(4, "big")], [0, 1, 2])
door.sendall(asked)
sys.exit(int(door.recv(16) or b"1"))
"""


@contextmanager
def warm(folder: Path) -> Iterator[Path]:
    """Give a folder to put first in PATH; the process behind its `skep` ends with the block."""
    door = folder / "warm.sock"
    program = folder / "bin" / "skep"
    program.parent.mkdir()
    program.write_text(_PROGRAM.format(python=sys.executable, socket=str(door)))
    program.chmod(0o755)
    server = subprocess.Popen([sys.executable, "-m", __name__, str(door)], cwd=Path(__file__).parents[1])
    try:
        deadline = time.monotonic() + START_S
        while not door.exists():
            assert server.poll() is None and time.monotonic() < deadline, "nothing is warm"
            time.sleep(0.02)
        yield program.parent
    finally:
        server.kill()
        server.wait()


def serve(path: str) -> NoReturn:
    """Fork for each caller, for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in LATE:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended but its caller
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{path}.new")
        listening.listen()
        Path(f"{path}.new").rename(path)
        while True:
            caller, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                answer(caller)
            caller.close()


def answer(caller: socket.socket) -> NoReturn:
    """Run what one caller asks for in a child, and tell the caller how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(caller, 4, 3)
    with caller.makefile("rb") as reader:
        words, folder, environment = json.loads(reader.read(int.from_bytes(head, "big")))
    if (child := os.fork()) == 0:
        caller.close()
        become(words, folder, environment, streams)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(BrokenPipeError):
        caller.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def become(words: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> NoReturn:
    """Be the program `skep`, as far as it can tell."""
    from skep.cli import main

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = ["skep", *words]
    main()
    sys.exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
