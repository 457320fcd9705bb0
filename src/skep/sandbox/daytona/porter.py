"""Start the twin on a machine of Daytona, and carry its bytes over a terminal. It runs there, as the machine's user.

Python 3.9 or newer and nothing but its standard library. The toolbox drops whoever falls 256 messages behind, so what
the twin says goes out in parcels, a length before each, and only as many as the controller has room for. What comes in
are lines: base64 without a `+` for the twin, or `+` and the number of parcels that have been taken.
"""

from __future__ import annotations

import base64
import os
import pwd
import signal
import sys
import threading
import tty
from typing import NoReturn

#: A parcel is read from the terminal in one piece or two, each a message; so many are on their way at most.
PARCEL_BYTES, PARCELS = 4000, 120
LENGTH_BYTES = 2
_LAST_WORDS_S = 2.0


def main() -> None:
    word, home, *twin = sys.argv[1:]
    tty.setraw(0)
    (orders, ordering), (reporting, reports) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _become(home, twin, orders, reports)
    os.close(orders)
    os.close(reports)
    os.write(1, word[::-1].encode() + b"\n")  # the terminal has shown the word itself while it was typed
    room = threading.Semaphore(PARCELS)
    threading.Thread(target=_hear, args=(ordering, room), daemon=True).start()
    speaker = threading.Thread(target=_speak, args=(reporting, room), daemon=True)
    speaker.start()
    os.waitpid(child, 0)
    speaker.join(_LAST_WORDS_S)
    os._exit(0)


def _become(home: str, twin: list[str], orders: int, reports: int) -> NoReturn:
    """Turn into the twin, as the user `agent` and away from the terminal."""
    try:
        os.setsid()
        nothing = os.open("/dev/null", os.O_WRONLY)
        for fd, number in ((orders, 0), (reports, 1), (nothing, 2)):
            os.dup2(fd, number)
        os.closerange(3, 1024)
        if os.geteuid() == 0:
            agent = pwd.getpwnam("agent")
            os.initgroups(agent.pw_name, agent.pw_gid)
            os.setresgid(agent.pw_gid, agent.pw_gid, agent.pw_gid)
            os.setresuid(agent.pw_uid, agent.pw_uid, agent.pw_uid)
        os.chdir(home)
        os.execve(sys.executable, [sys.executable, "-I", "-u", *twin], {"PATH": os.defpath})  # noqa: S606
    finally:
        os._exit(1)


def _hear(ordering: int, room: threading.Semaphore) -> None:
    rest = b""
    while data := _read(0, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"+"):
                for _ in range(int(line)):
                    room.release()
            else:
                _write(ordering, base64.urlsafe_b64decode(line))
    os.close(ordering)


def _speak(reporting: int, room: threading.Semaphore) -> None:
    while data := os.read(reporting, PARCEL_BYTES):
        room.acquire()
        _write(1, len(data).to_bytes(LENGTH_BYTES, "big") + data)


def _read(fd: int, size: int) -> bytes:
    try:
        return os.read(fd, size)
    except OSError:
        return b""  # a terminal that has been hung up


def _write(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except OSError:
            os._exit(0)  # whoever was to read it is gone


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    main()
