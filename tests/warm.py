"""Programs that have everything loaded: a process that forks for each, `python -m tests.warm SOCKET`.

To load Skep takes most of the time of a short program. `warm` gives a folder with two programs in it: `skep`, and
`python`, which runs the file that it is given. They hand their words, folder, environment and open streams to that
process, end as the fork does, and take it along when they are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import NoReturn

START_S = 60.0
PR_SET_PDEATHSIG = 1
#: What programs load late, and what those of the tests are made of.
LATE = (
    "aiosqlite", "alembic.command", "rich.table", "sqlalchemy.dialects.sqlite.aiosqlite", "sqlalchemy.ext.asyncio",
    "skep.app.computer", "skep.cli.run", "skep.sandbox.bubblewrap", "skep.workspace.archiving",
    "skep.workspace.snapshot.build", "skep.workspace.workspaces", "tests.crashes.workspace_deeds",
)  # fmt: skip

_PROGRAM = """\
#!{python} -IS
import json, os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect({socket!r})
asked = json.dumps([{words}, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(door, [len(asked).to_bytes(4, "big")], [0, 1, 2])
door.sendall(asked)
code = int(door.recv(16) or b"1")
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
_PROGRAMS = {"skep": "['skep', *sys.argv[1:]]", "python": "sys.argv[1:]"}


@contextmanager
def warm(folder: Path) -> Iterator[Path]:
    """Give a folder to put first in PATH; the process behind its programs ends with the block."""
    door, scripts = folder / "warm.sock", folder / "bin"
    scripts.mkdir()
    for name, words in _PROGRAMS.items():
        (scripts / name).write_text(_PROGRAM.format(python=sys.executable, socket=str(door), words=words))
        (scripts / name).chmod(0o755)
    server = subprocess.Popen([sys.executable, "-m", __name__, str(door)], cwd=Path(__file__).parents[1])
    try:
        deadline = time.monotonic() + START_S
        while not door.exists():
            assert server.poll() is None and time.monotonic() < deadline, "nothing is warm"
            time.sleep(0.02)
        yield scripts
    finally:
        server.kill()
        server.wait()


def serve(path: str) -> NoReturn:
    """Fork for each caller, for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in LATE:
        import_module(name)
    gc.freeze()  # so that a fork's collector does not copy everything
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
    for stream in streams:
        os.close(stream)
    either = select.poll()
    either.register(os.pidfd_open(child), select.POLLIN)
    either.register(caller, select.POLLIN)  # it has said all: what comes is its end
    if all(fd == caller.fileno() for fd, _ in either.poll()):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        caller.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(words: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> NoReturn:
    """Be the program, as far as it can tell."""
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
    sys.argv[:] = words
    if words[0] == "skep":
        main()
    else:
        run_path(words[0], run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
