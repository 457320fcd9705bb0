"""A container like a sandbox's own but for what a test takes away, to show what each protection stops.

It runs a few lines of Python instead of the agent: they end well if they got through, and an `OSError` or a failed
`assert` means that they were held.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from tests.docker.daemon import Daemon

from skep.sandbox.docker import DockerSandbox

PYTHON = "/usr/bin/python3"
_PRELUDE = """
import ctypes, os, socket, subprocess, sys
sys.excepthook = lambda kind, error, _: os._exit(1 if issubclass(kind, (OSError, AssertionError, MemoryError)) else 70)
libc = ctypes.CDLL(None, use_errno=True)

def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def reaches(number, *arguments):
    # The kernel knows a call that it answers with anything but this.
    assert libc.syscall(number, *arguments) >= 0 or ctypes.get_errno() != 38

def status(name):
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name + ":"))
"""


def api_of(daemon: Daemon) -> Any:
    from docker import APIClient

    return closing(APIClient(base_url=daemon.host, version="auto"))


def gets_through(daemon: Daemon, sandbox: DockerSandbox, lines: str, **changes: object) -> bool:
    """Run lines in a sibling of a sandbox's container, with some of its settings changed."""
    with api_of(daemon) as api:
        found = api.inspect_container(sandbox.container.name)
        own = {name: changes.pop(name, found["Config"][name]) for name in ("User", "WorkingDir")}
        settings = {**found["HostConfig"], "AutoRemove": False, **changes}
        body = {**own, "Image": found["Config"]["Image"], "Entrypoint": [PYTHON, "-I", "-c"], "HostConfig": settings}
        made = api.create_container_from_config({**body, "Cmd": [_PRELUDE + lines]})
        try:
            api.start(made["Id"])
            code = api.wait(made["Id"], timeout=60)["StatusCode"]
        finally:
            api.remove_container(made["Id"], force=True, v=True)
    assert code in (0, 1, 137), f"the attempt is broken: {code}"
    return bool(code == 0)


async def gets_through_in(sandbox: DockerSandbox, lines: str) -> bool:
    """Run the same lines as a command of the sandbox itself."""
    ran = await sandbox.run([PYTHON, "-I", "-c", _PRELUDE + lines])
    assert ran.exit_code in (0, 1, 137), ran
    return ran.ok
