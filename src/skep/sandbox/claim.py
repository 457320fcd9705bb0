"""Take a folder of the host as a workspace: settle which user its sandbox runs as."""

from __future__ import annotations

import os
import secrets
import stat

from skep.errors import InvalidRequest

#: Users that no distribution, container engine or systemd hands out, so that a sandbox of root's is nobody else.
_FIRST_UID, _UID_COUNT = 0x70000000, 0x0FFF0000

Owner = tuple[int, int]


def claim(folder: str, *, adopt: bool = False) -> tuple[int, Owner | None]:
    """Open a workspace folder, made if it is missing; return it with the host user that its sandbox runs as.

    That user is None when Skep itself is an ordinary user. When Skep is root, a folder gets a user of its own the
    first time, and keeps it.
    """
    fd = _open(folder)
    try:
        return fd, _owner(fd, folder, adopt=adopt)
    except BaseException:
        os.close(fd)
        raise


def _open(folder: str) -> int:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRequest(
            f"{folder!r} cannot be used as a workspace: {reason}", hint="give a folder that you can write to"
        ) from error


def _owner(fd: int, folder: str, *, adopt: bool) -> Owner | None:
    found = os.fstat(fd)
    if os.geteuid() != 0:
        if found.st_uid != os.geteuid():
            raise InvalidRequest(
                f"the workspace {folder!r} belongs to another user", hint="choose a folder of your own"
            )
        return None
    if _FIRST_UID <= found.st_uid < _FIRST_UID + _UID_COUNT:
        return found.st_uid, found.st_uid
    if os.listdir(fd) and not adopt:
        raise InvalidRequest(
            f"the workspace {folder!r} has files of another user, and a sandbox runs as a user of its own",
            hint="start from an empty folder, or pass adopt=True to hand the files over",
        )
    uid = _FIRST_UID + secrets.randbelow(_UID_COUNT)
    _hand_over(fd, uid)
    return uid, uid


def _hand_over(folder: int, uid: int) -> None:
    for _, folders, files, at in os.fwalk(".", dir_fd=folder, follow_symlinks=False):
        for name in (*folders, *files):
            found = os.stat(name, dir_fd=at, follow_symlinks=False)
            if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                raise InvalidRequest(
                    f"{name!r} has other names (hard links) and cannot be handed over", hint="copy it first"
                )
            os.chown(name, uid, uid, dir_fd=at, follow_symlinks=False)
    os.fchown(folder, uid, uid)
