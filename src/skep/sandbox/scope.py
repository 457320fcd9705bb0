"""A scope from systemd: a group of this process's own, delegated to it.

Asked for only when nothing else serves, once per process, of the user's own manager (root asks the system's). This
process then leaves the group it was started in, as with `systemd-run --scope`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import subprocess
import time
from pathlib import Path

from skep.sandbox.hierarchy import members, own_folder

_WAIT_S = 2.0
_MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")


def is_harmless(own: Path) -> bool:
    """Say whether this process can leave its group unmissed: not if it is what a service consists of."""
    return own.name.endswith(".scope") or str(os.getppid()) in members(own)


def is_delegated(unit: str) -> bool:
    """Ask the user's manager whether it has delegated the group of one of its units."""
    return _run("systemctl", "show", "--property=Delegate", "--value", "--", unit) == "yes\n"


def enter() -> bool:
    """Ask systemd to put this process into a scope that is delegated to it; say whether it did."""
    if not _systemd_knows_our_number() or not _bus_answers():
        return False
    name = f"skep-{os.getpid()}-{secrets.token_hex(4)}.scope"
    properties = [
        ("Description", "s", "Skep and its sandboxes"),
        ("PIDs", "au", "1", str(os.getpid())),
        ("Delegate", "b", "true"),
        ("CollectMode", "s", "inactive-or-failed"),
    ]
    words = [word for entry in properties for word in entry]
    call = [
        "call",
        *_MANAGER,
        "StartTransientUnit",
        "ssa(sv)a(sa(sv))",
        name,
        "fail",
        str(len(properties)),
        *words,
        "0",
    ]
    return _run("busctl", *call) is not None and _arrived(name)


def _run(program: str, *words: str) -> str | None:
    """Run a program of systemd's against our manager and return what it printed; None if that failed."""
    path = shutil.which(program, path="/usr/local/bin:/usr/bin:/bin")
    uid = os.geteuid()
    whose, env = ("--system", {}) if uid == 0 else ("--user", {"XDG_RUNTIME_DIR": f"/run/user/{uid}"})
    if path is None:
        return None
    try:
        ran = subprocess.run(
            [path, whose, *words],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 else None


def _arrived(name: str) -> bool:
    """Wait until systemd has moved us: its answer says only that it will."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        own = own_folder("")
        if own is not None and own.name == name:
            return True
        time.sleep(0.005)
    return False


def _systemd_knows_our_number() -> bool:
    # In a process namespace that is not systemd's, our number is another process's.
    try:
        return Path("/proc/1/comm").read_text() == "systemd\n"
    except OSError:
        return False


def _bus_answers() -> bool:
    uid = os.geteuid()
    try:
        found = os.stat("/run/dbus/system_bus_socket" if uid == 0 else f"/run/user/{uid}/bus")
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == uid
