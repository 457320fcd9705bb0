"""Users inside a sandbox: names over the one that there is, as its root is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from skep.errors import Denied, SkepError
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


async def equip(sandbox: Sandbox) -> bool:
    """Make the tools work with which root adds users; say whether they can, which takes an /etc to write to."""
    try:
        await sandbox.files.write(f"{_TOOLS}/adduser", _ADDUSER, mode=0o755)
        return (await sandbox.run(["chmod", "644", "/etc/passwd", "/etc/group"])).ok
    except Denied:
        return False


async def identify(sandbox: Sandbox, user: str | None) -> Identity | None:
    """Find a user by name or number; None if there is no such user."""
    if user in (None, "", "agent", "1000"):
        return AGENT
    if user in ("root", "0"):
        return ROOT
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
