"""Become runsc, as an ordinary user with nothing of the host's network: a program of its own, run on the host.

It is told what to do by JSON on descriptor 3. It joins the sandbox's control groups, shows the folders of the host at
places that the sandbox's own user can walk, in a mount namespace that goes with it, becomes that user when Skep is
root, and enters a user namespace in which it is the only one: what runsc calls rootless, for everybody alike.

It imports nothing of Skep: the interpreter is started with neither site packages nor environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any, NoReturn

_ORDERS = 3
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x40000000
_ALONE = _NEW_USER | _NEW_MOUNTS | _NEW_NET | _NEW_IPC | _NEW_UTS
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_RECURSIVE, _READ_ONLY = 442, 0x8000, 1
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 1, 4, 38

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    orders = _orders()
    _join(orders["doors"])
    if os.geteuid() == 0:
        _unshare(_NEW_MOUNTS)
        _show(orders["binds"])
        _bind(*orders["folder"])
        _become(*orders["owner"])
        _be_alone()
    else:
        _be_alone()
        _show(orders["binds"])
    _control(_SET_NO_NEW_PRIVILEGES, 1)
    # Set last: the kernel forgets it whenever a process changes its user.
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != orders["parent"]:
        sys.exit("the controller has gone")
    os.execve(orders["argv"][0], orders["argv"], {})  # noqa: S606 - a path and its arguments, from the controller


def _orders() -> dict[str, Any]:
    with open(_ORDERS, "rb") as file:
        orders: dict[str, Any] = json.load(file)
    return orders


def _join(doors: list[int]) -> None:
    for door in doors:
        os.write(door, b"0")
        os.close(door)


def _show(binds: list[tuple[str, str, str, bool, int]]) -> None:
    _check(_libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None), "/")
    for source, target, _, read_only, inode in binds:
        _bind(source, target)
        if inode and os.stat(target).st_ino != inode:
            sys.exit(f"{source}: it is another folder by now")
        if read_only:
            # Not left to runsc, which forgets what else a mount was locked to (nosuid, say) and is refused.
            change = (ctypes.c_uint64 * 4)(_READ_ONLY)
            _check(_libc.syscall(_MOUNT_SETATTR, -1, os.fsencode(target), _AT_RECURSIVE, change, 32), source)


def _bind(source: str, target: str) -> None:
    _check(_libc.mount(os.fsencode(source), os.fsencode(target), None, _BIND | _RECURSIVE, None), source)


def _become(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    # Otherwise its own files in /proc stay root's, and it could not say who it is in the namespace to come.
    _control(_SET_DUMPABLE, 1)


def _be_alone() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _unshare(_ALONE)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _unshare(what: int) -> None:
    _check(_libc.unshare(what), "namespaces")


def _control(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _check(result: int, what: str) -> None:
    if result != 0:
        sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
