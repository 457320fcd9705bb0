"""Open files beneath a folder that somebody hostile can write to.

Every look-up is one `openat2(2)` call in which the kernel itself refuses to leave the folder, so nothing planted or
renamed in the middle of it can lead elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from skep.errors import SandboxUnusable

_OPENAT2 = 437  # the same number on every architecture
NO_MAGIC_LINKS, NO_SYMLINKS, BENEATH, IN_ROOT = 0x02, 0x04, 0x08, 0x10

_libc = ctypes.CDLL(None, use_errno=True)


def openat2(folder_fd: int, path: str, flags: int, *, mode: int = 0, resolve: int) -> int:
    """Open a path below a folder and return the descriptor, raising OSError as `os.open` does."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve | NO_MAGIC_LINKS)
    name = os.fsencode(path) or b"."
    if b"\0" in name:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    for _ in range(32):
        fd = int(_libc.syscall(_OPENAT2, folder_fd, name, how, len(how)))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: a rename raced the look-up
            break
    if code == errno.ENOSYS:
        raise SandboxUnusable(
            "this kernel has no openat2(2), which Skep needs to read an agent's files safely",
            hint="use Linux 5.6 or newer",
        )
    raise OSError(code, os.strerror(code), path)
