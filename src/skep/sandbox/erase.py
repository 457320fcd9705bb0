"""Remove a folder tree that an agent has made, whatever it looks like.

`shutil.rmtree` goes down by recursion with a descriptor per level and stops at folders it may not enter, so a tree
that is deep enough, or one folder with mode 000, would stay. Here folders are opened up, and lifted to the top before
they are emptied: one level, two descriptors, any depth. No step follows a link, so it may be done while the agent runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: As many as the deepest tree needs; somebody who goes on adding does not keep this going for ever.
_ROUNDS = 1 << 17


def erase(path: str, inode: int) -> None:
    """Remove a folder with all that is in it, if it still is the one with this inode; another is left alone."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.lstat(path).st_ino != inode:
            return
        folder = _opened_up(path)
        try:
            if os.fstat(folder).st_ino != inode:
                return
            empty(folder)
        finally:
            os.close(folder)
        os.rmdir(path)


def erase_at(above: int, name: str) -> None:
    """Remove a folder with all that is in it, by its name in an open folder."""
    folder = _opened_up(name, above)
    try:
        empty(folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=above)


def empty(folder: int) -> None:
    """Remove all that is in an open folder."""
    for _ in range(_ROUNDS):
        names = os.listdir(folder)
        if not names:
            return
        for name in names:
            if not _removed(folder, name):
                _lift_out(folder, name)
                _removed(folder, name)  # unless something was added to it: then the next round sees to it
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


def _lift_out(top: int, name: str) -> None:
    """Remove what is in a folder, and move the folders in it that are not empty to the top."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # gone, or something else by now
        folder = _opened_up(name, top)
        try:
            for inner in os.listdir(folder):
                if not _removed(folder, inner):
                    # A folder that moves is written to: its `..` changes.
                    os.close(_opened_up(inner, folder))
                    os.rename(inner, f".erase-{secrets.token_hex(8)}", src_dir_fd=folder, dst_dir_fd=top)
        finally:
            os.close(folder)


def _opened_up(name: str, above: int | None = None) -> int:
    """Open a folder that may be shut to its owner. Its mode is changed by descriptor: a name could be a link by now."""
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        if os.fstat(place).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(".", _FOLDER, dir_fd=place)
    finally:
        os.close(place)


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
