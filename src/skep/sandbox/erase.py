"""Remove a folder tree that an agent has made, whatever it looks like.

`shutil.rmtree` goes down by recursion with a descriptor per level and stops at folders it may not enter, so a tree
that is deep enough, or one folder with mode 000, would stay. Here folders are opened up, and lifted to the top before
they are emptied: one level, two descriptors, any depth.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def erase(path: str, inode: int) -> None:
    """Remove a folder with all that is in it, if it still is the one with this inode; another is left alone."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.lstat(path).st_ino != inode:
            return
        os.chmod(path, 0o700)
        folder = os.open(path, _FOLDER)
        try:
            if os.fstat(folder).st_ino != inode:
                return
            empty(folder)
        finally:
            os.close(folder)
        os.rmdir(path)


def empty(folder: int) -> None:
    """Remove all that is in an open folder."""
    while names := os.listdir(folder):
        for name in names:
            if not _removed(folder, name):
                _lift_out(folder, name)
                os.rmdir(name, dir_fd=folder)


def _lift_out(top: int, name: str) -> None:
    """Remove what is in a folder, and move the folders in it that are not empty to the top."""
    os.chmod(name, 0o700, dir_fd=top)
    folder = os.open(name, _FOLDER, dir_fd=top)
    try:
        for inner in os.listdir(folder):
            if not _removed(folder, inner):
                os.chmod(inner, 0o700, dir_fd=folder)  # a folder that moves is written to: its `..` changes
                os.rename(inner, f".erase-{secrets.token_hex(8)}", src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)


def _removed(folder: int, name: str) -> bool:
    """Remove a file or an empty folder; False for a folder with something in it."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.rmdir(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
