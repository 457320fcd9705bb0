"""The files of a sandbox as the standard library speaks of them."""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from skep.errors import Conflict, Denied, InvalidRequest, NotFound, StorageFull
from skep.sandbox.files import READ_LIMIT_BYTES, Entry, Files

HOME = "/workspace"
#: As many links in one path as the kernel follows.
_MOST_LINKS = 40


class Filesystem:
    """Follow links in every part of a path, write through them, and raise `OSError`s. Relative paths are below HOME.

    A sandbox that is lost, or a file larger than what is read, stays the error that it is in Skep.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    async def read(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        async with self._meant(path):
            return await self._files.read(path, limit_bytes=limit_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """Replace a file, or what a link leads to; one that its owner may not write is left alone."""
        target = await self.realpath(path)
        async with self._meant(path):
            there = await self._look(target)
            if there is not None and there.kind == "folder":
                raise _error(errno.EISDIR, path)
            # A file is replaced by another, which asks for no right to the one that is there.
            if there is not None and there.kind == "file" and not there.mode & 0o200:
                raise _error(errno.EACCES, path)
            if there is not None and there.kind == "other":
                raise _error(errno.EINVAL, path)
            await self._files.write(target, data)

    async def stat(self, path: str) -> Entry:
        """Describe what a path leads to, by the last name in the path."""
        target = await self.realpath(path)
        async with self._meant(path):
            found = await self._files.stat(target)
        return replace(found, name=posixpath.basename(path.rstrip("/")))

    async def list(self, path: str) -> list[Entry]:
        """List a folder; a link is described as what it leads to, or as itself if that is nothing."""
        async with self._meant(path):
            entries = await self._files.list(path)
        return [entry if entry.kind != "link" else await self._beyond(path, entry) for entry in entries]

    async def mkdir(self, path: str) -> None:
        try:
            async with self._meant(path):
                await self._files.mkdir(path)
        except NotADirectoryError:
            if await self.exists(path):
                raise _error(errno.EEXIST, path) from None
            raise

    async def remove(self, path: str) -> None:
        """Remove a file, a link, or a folder with all that is in it."""
        async with self._meant(path):
            await self._files.remove(path, recursive=True)

    async def exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def realpath(self, path: str) -> str:
        """Return where a path leads; what is missing of it is kept as it is written."""
        left = list(reversed(posixpath.join(HOME, path).split("/")))
        resolved, links = "/", 0
        while left:
            part = left.pop()
            if part == "..":
                resolved = posixpath.dirname(resolved)
            elif part not in ("", "."):
                step = posixpath.join(resolved, part)
                async with self._meant(path):
                    there = await self._look(step)
                if there is None or there.target is None:
                    resolved = step
                    continue
                links += 1
                if links > _MOST_LINKS:
                    raise _error(errno.ELOOP, path)
                left += reversed(there.target.split("/"))
                resolved = "/" if there.target.startswith("/") else resolved
        return resolved

    async def _look(self, path: str) -> Entry | None:
        try:
            return await self._files.stat(path)
        except Denied:
            raise
        except (NotFound, InvalidRequest):
            return None

    async def _beyond(self, folder: str, link: Entry) -> Entry:
        try:
            return await self.stat(posixpath.join(folder, link.name))
        except OSError:
            return link

    @asynccontextmanager
    async def _meant(self, path: str) -> AsyncIterator[None]:
        """Turn Skep's answer about a path into that of the standard library."""
        try:
            yield
        except NotFound as error:
            raise _error(errno.ENOENT, path) from error
        except Denied as error:
            raise _error(errno.EACCES, path) from error
        except StorageFull as error:
            raise _error(errno.ENOSPC, path) from error
        except Conflict as error:
            raise _error(errno.EEXIST, path) from error
        except InvalidRequest as error:
            raise _error(await self._fault(path), path) from error

    async def _fault(self, path: str) -> int:
        """Find out what is wrong with a path that Skep calls invalid: mechanisms word it in their own ways."""
        whole = await self.realpath(path)
        if (there := await self._look(whole)) is not None and there.kind == "folder":
            return errno.EISDIR
        return errno.EINVAL if "\0" in path else errno.ENOTDIR


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
