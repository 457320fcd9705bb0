"""Users inside a sandbox: names over the one that there is, as its root is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from skep.errors import SkepError
from skep.sandbox.sandbox import Sandbox, User

#: What a bubblewrap sandbox is made with so that its root can add users.
OPTIONS: Mapping[str, object] = {"users": True}

_TOOLS = "/etc/skep/sbin"
_ROOT_PATH = f"{_TOOLS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Debian's adduser asks PAM, and locks a file in /run; neither is there. What it does is done by useradd.
_ADDUSER = """#!/bin/sh
# adduser [--comment TEXT] [--home FOLDER] [--shell PROGRAM] [--uid NUMBER] [OPTION...] NAME
shell=/bin/bash
while [ $# -gt 1 ]; do
    case "$1" in
        --comment|--gecos) comment=$2; shift ;;
        --home) home=$2; shift ;;
        --shell) shell=$2; shift ;;
        --uid) uid=$2; shift ;;
    esac
    shift
done
case "${1:-}" in ""|-*) echo "adduser: name a user" >&2; exit 1 ;; esac
exec useradd -m -U ${uid:+-u "$uid"} -d "${home:-/home/$1}" -s "$shell" -c "${comment:-}" "$1"
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """How a command is started for a user."""

    user: User = "agent"
    env: Mapping[str, str] = field(default_factory=dict)


AGENT = Identity()
ROOT = Identity("root", {"PATH": _ROOT_PATH})


async def equip(sandbox: Sandbox) -> None:
    """Make the tools work with which root adds users, in a sandbox that was made with `OPTIONS`.

    Never in another: the /etc of one without isolation is that of the machine.
    """
    await sandbox.files.write(f"{_TOOLS}/adduser", _ADDUSER, mode=0o755)
    await sandbox.run(["chmod", "644", "/etc/passwd", "/etc/group"])


def usual(user: str | None) -> Identity | None:
    """Return one of the two users of every sandbox by its name or number, if it is one of them."""
    if user in (None, "", "agent", "1000"):
        return AGENT
    return ROOT if user in ("root", "0") else None


async def added(sandbox: Sandbox, user: str) -> Identity | None:
    """Find a user that root has added by its name or number; None if there is no such user."""
    for line in (await _passwd(sandbox)).splitlines():
        name, _, uid, gid, _, home, *_ = [*line.split(":"), *[""] * 7]
        if user in (name, uid) and uid.isdecimal() and gid.isdecimal():
            return Identity(
                "root", {"SKEP_UID": uid, "SKEP_GID": gid, "USER": name, "LOGNAME": name, "HOME": home or "/"}
            )
    return None


async def _passwd(sandbox: Sandbox) -> str:
    try:
        return (await sandbox.files.read("/etc/passwd", limit_bytes=1 << 20)).decode(errors="replace")
    except SkepError:
        return ""
