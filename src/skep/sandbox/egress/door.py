"""Open sockets in a sandbox's network namespace from outside: the native agent's life as a door."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Sequence

from skep.errors import SandboxUnusable
from skep.sandbox.agent import OPEN, order
from skep.sandbox.binary import native

#: As many as the door takes at once; port 53 gives two sockets.
MOST_PORTS = 15
_OPEN_S = 5.0


def open_door(namespace: int, ports: Sequence[int], *, lead_home: bool) -> list[socket.socket]:
    """Open listening sockets in a sandbox's network namespace and return them.

    With `lead_home` every address inside is made to lead to them first.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = os.memfd_create("ports", os.MFD_CLOEXEC)
    complaints = os.memfd_create("complaints", os.MFD_CLOEXEC)
    try:
        os.write(memory, struct.pack(f"={len(ports)}H", *ports))
        pid = os.posix_spawn(
            native("skep-agent"),
            ["skep-agent", "door"],
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, complaints, 2), (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)],
        )
        theirs.close()
        fds = _ask(ours, pid, order(OPEN, 1, int(lead_home)), [namespace, memory])
        if not fds:
            said = os.pread(complaints, 4096, 0).decode(errors="replace").strip()
            raise SandboxUnusable(
                f"the sandbox's network cannot be opened: {said or 'it gave no reason'}",
                hint="end what listens on these ports inside, or run the sandbox without an allow-list",
            )
        return [socket.socket(fileno=fd) for fd in fds]
    finally:
        ours.close()
        theirs.close()
        os.close(memory)
        os.close(complaints)


def _ask(ours: socket.socket, pid: int, message: bytes, fds: Sequence[int]) -> list[int]:
    ours.settimeout(_OPEN_S)
    try:
        socket.send_fds(ours, [message], list(fds))
        _, opened, _, _ = socket.recv_fds(ours, 128, 2 * MOST_PORTS)
    except OSError:  # also when it takes too long
        opened = []
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)  # it has done its work, or never will
            os.waitpid(pid, 0)
    return opened
