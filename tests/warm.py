"""Programs that have everything loaded: a process that forks for each, `python -m tests.warm SOCKET OWNER`.

To load Skep takes most of the time of a short program. `warm` gives a folder with two programs in it: `skep`, and
`python`, which runs the file that it is given. They hand their words, folder, environment and open streams to that
process, pass on the signals that ask for an end, end as the fork does, and take it along when they are killed. One
process serves all workers of a session, and goes with the process that owns them.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import pkgutil
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import NoReturn

import skep

START_S = 60.0
#: What programs load late, beside all of Skep but these, and what those of the tests are made of.
LATE = (
    "aiosqlite", "alembic.command", "dbos", "fastapi", "psycopg", "pydantic_ai.models", "rich.table",
    "sqlalchemy.dialects.sqlite.aiosqlite", "sqlalchemy.ext.asyncio", "sse_starlette",
    "uvicorn.protocols.http.h11_impl", "tests.crashes.workspace_deeds",
)  # fmt: skip
NEVER = (
    "skep.__main__", "skep.integrations", "skep.sandbox.kernels.python_kernel", "skep.state.migrations", "skep.testing",
)  # fmt: skip

_PROGRAM = """\
#!{python} -IS
import json, os, signal, socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect({socket!r})
asked = json.dumps([{words}, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(door, [len(asked).to_bytes(4, "big")], [0, 1, 2])
door.sendall(asked)
with door.makefile("r") as told:
    pid = int(told.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(told.readline() or "1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
_PROGRAMS = {"skep": "['skep', *sys.argv[1:]]", "python": "sys.argv[1:]"}


def warm(folder: Path, owner: int) -> Path:
    """Return a folder to put first in PATH, once for all who share `folder`; what is behind it goes with `owner`."""
    door, scripts = folder / "warm.sock", folder / "bin"
    folder.mkdir(mode=0o755, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not scripts.exists():
            scripts.mkdir()
            for name, words in _PROGRAMS.items():
                (scripts / name).write_text(_PROGRAM.format(python=sys.executable, socket=str(door), words=words))
                (scripts / name).chmod(0o755)
            _start(door, owner)
        deadline = time.monotonic() + START_S
        while not door.exists():
            assert time.monotonic() < deadline, f"nothing is warm: {(folder / 'log').read_text()}"
            time.sleep(0.02)
    return scripts


def _start(door: Path, owner: int) -> None:
    """Start the process behind the programs; bare, since nobody waits for it."""
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).strip(":")}
    log = str(door.with_name("log"))
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", __name__, str(door), str(owner)],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def modules() -> Iterator[str]:
    """Name everything that a program could load, but what only some who use Skep have."""
    yield from LATE
    for found in pkgutil.walk_packages(skep.__path__, "skep."):
        if not found.name.startswith(NEVER):
            yield found.name


def serve(path: str, owner: int) -> None:
    """Fork for each caller, as long as the owner lives."""
    for name in modules():
        import_module(name)
    gc.freeze()  # so that a fork's collector does not copy everything
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended but its caller
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{path}.new")
        listening.listen(64)
        Path(f"{path}.new").rename(path)
        either = select.poll()
        either.register(gone := os.pidfd_open(owner), select.POLLIN)
        either.register(listening, select.POLLIN)
        while all(fd != gone for fd, _ in either.poll()):
            caller, _ = listening.accept()
            if os.fork() == 0:
                os.close(gone)
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
    caller.sendall(b"%d\n" % child)
    for stream in streams:
        os.close(stream)
    either = select.poll()
    either.register(os.pidfd_open(child), select.POLLIN)
    either.register(caller, select.POLLIN)  # it has said all: what comes is its end
    if all(fd == caller.fileno() for fd, _ in either.poll()):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        caller.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
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
    serve(sys.argv[1], int(sys.argv[2]))
