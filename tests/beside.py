"""Programs that take long run beside the tests, one after the other, from the start: `python -m tests.beside FOLDER …`.

One process runs them for all workers of a session. The tests that ask for what they found come last, so that nobody
waits for them.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

#: By the fixture that gives what a program found; in the order in which they run.
PROGRAMS = {
    "science": "tests.science_environment",
    "guest": "tests.sandbox.guest.boot",
    "told": "tests.contracts.world",
}
#: How long one may take, and how long a test waits for it and for those before it.
PROGRAM_S, WAIT_S = 600, 900
PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parent.parent

Ran = subprocess.CompletedProcess[str]


def asked_for(item: pytest.Item) -> list[str]:
    """Return the programs that a test waits for."""
    return [program for fixture, program in PROGRAMS.items() if fixture in getattr(item, "fixturenames", ())]


def put_last(items: list[pytest.Item]) -> None:
    """Let the tests that wait for a program come after all others, in the order of the programs."""
    order = list(PROGRAMS.values())
    for item in items:
        if asked_for(item):
            item.add_marker(pytest.mark.timeout(WAIT_S + 60))
    items.sort(key=lambda item: max(map(order.index, asked_for(item)), default=-1))


def start(folder: Path, items: Iterable[pytest.Item]) -> None:
    """Start what the tests ask for, unless another worker has."""
    wanted = {program for item in items for program in asked_for(item)}
    programs = [program for program in PROGRAMS.values() if program in wanted]
    if not programs:
        return
    try:
        folder.mkdir()
    except FileExistsError:
        return
    # Bare, since nobody waits for it: it goes with this process, however that ends. Its lock tells whether it lives.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        command = [sys.executable, "-m", __name__, str(folder), *programs]
        os.posix_spawn(sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, 0, 0)])


def found(folder: Path, program: str) -> Ran:
    """Return how a program ended, as soon as it has."""
    deadline = time.monotonic() + WAIT_S
    while (alive := _locked(folder / "lock")) and not (folder / program).exists():
        assert time.monotonic() < deadline, f"{program} did not come to its end"
        time.sleep(0.05)
    assert alive or (folder / program).exists(), f"{program} was ended before its end"
    return Ran(**json.loads((folder / program).read_text()))


def _locked(file: Path) -> bool:
    with file.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def main(folder: Path, programs: Iterable[str]) -> None:
    """Run the programs, and leave how each ended in a file with its name."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for program in programs:
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", program]
        try:
            ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROGRAM_S)
        except subprocess.TimeoutExpired as error:
            ran = Ran(command, 1, "", f"no end within {PROGRAM_S} s: {error.stderr!r}")
        (folder / "draft").write_text(json.dumps(vars(ran)))
        (folder / "draft").rename(folder / program)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
