"""The door of a held workspace: a unix socket through which other processes of the same user ask its holder.

One question and one answer per connection. The door greets first: whoever is not greeted can be sure that nothing was
done, and try to hold the workspace itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from skep.errors import Defect, Denied, LimitReached, NotFound, SkepError, Unavailable
from skep.workspace.message import Answer, packed, receive, receive_answer, send_answer, send_failure

__all__ = ["Answer", "Door", "NobodyHome", "call"]

_NAME = "door"
_GREETING = b"\x01"
_CREDENTIALS = struct.Struct("=iII")
_MOST_ASKED_BYTES = 1 << 20
_MOST_ANSWERED_BYTES = 64 << 20
#: How many may be about to ask, and how many may wait for an answer.
_MOST_UNHEARD = 128
_MOST_HEARD = 64
#: How long it may take to ask a question, and to take an answer.
_ASK_S = 10.0
_TAKE_S = 30.0
_REST_S = 0.05
#: What the kernel says when this process or the machine has no more to give.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Respond = Callable[[dict[str, Any]], Awaitable[Answer]]


class NobodyHome(NotFound):
    """No process holds the workspace, or it is about to let go; nothing was done."""


class Door:
    """The holder's side."""

    def __init__(self, folder: int, listener: socket.socket, respond: Respond) -> None:
        self._folder = folder
        self._listener = listener
        self._respond = respond
        self._loop = asyncio.get_running_loop()
        self._inode = os.stat(_NAME, dir_fd=folder).st_ino
        #: Conversations, oldest first, in which nothing was asked yet; and those in which something was.
        self._unheard: dict[asyncio.Task[None], None] = {}
        self._heard: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop.add_reader(listener, self._accept)

    @classmethod
    async def open(cls, folder: Path, respond: Respond) -> Door:
        """Open the door of a workspace's folder, in place of one that a dead holder left there.

        Only for whoever holds the workspace's lock. `respond` is called with each question, many at once; an error of
        Skep's own that it raises is raised for whoever asked.
        """
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _hang(fd, listener)
            return cls(fd, listener, respond)
        except BaseException:
            listener.close()
            os.close(fd)
            raise

    async def close(self) -> None:
        """Take no more questions, and wait until those that were heard are answered."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            if os.stat(_NAME, dir_fd=self._folder).st_ino == self._inode:
                os.unlink(_NAME, dir_fd=self._folder)
        os.close(self._folder)
        for task in self._unheard:
            task.cancel()
        if left := {*self._unheard, *self._heard}:
            await asyncio.wait(left)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_REST_S, self._accept_again)
            return
        peer.setblocking(False)
        if _uid_of(peer) == os.geteuid():
            self._receive(peer)
        else:
            peer.close()

    def _accept_again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _receive(self, peer: socket.socket) -> None:
        if len(self._unheard) >= _MOST_UNHEARD:
            oldest = next(iter(self._unheard))
            del self._unheard[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._converse(peer))
        self._unheard[task] = None
        task.add_done_callback(self._forget)
        task.add_done_callback(lambda _: peer.close())

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unheard.pop(task, None)
        self._heard.discard(task)

    async def _converse(self, peer: socket.socket) -> None:
        try:
            async with asyncio.timeout(_ASK_S):
                await self._loop.sock_sendall(peer, _GREETING)
                request = await receive(peer, most=_MOST_ASKED_BYTES)
        except (OSError, EOFError, ValueError, RecursionError):
            return  # none of ours, or it has gone
        with contextlib.suppress(OSError):
            async with contextlib.AsyncExitStack() as held:
                try:
                    answer = await self._answer(request)
                    held.enter_context(answer.closing())
                    await self._within(send_answer(peer, answer, most=_MOST_ANSWERED_BYTES))
                except SkepError as error:
                    await self._within(send_failure(peer, error, most=_MOST_ANSWERED_BYTES))

    async def _within(self, sending: Awaitable[None]) -> None:
        async with asyncio.timeout(_TAKE_S):
            await sending

    async def _answer(self, request: dict[str, Any]) -> Answer:
        task = asyncio.current_task()
        assert task is not None
        self._unheard.pop(task, None)
        if len(self._heard) >= _MOST_HEARD:
            raise LimitReached("too many ask the holder of the workspace at once", hint="try again")
        self._heard.add(task)
        try:
            return await self._respond(request)
        except OSError as error:
            raise Unavailable(f"the holder of the workspace failed: {error}", hint="try again") from error


async def call(folder: Path, request: dict[str, Any], *, timeout_s: float = 600.0) -> Answer:
    """Ask the holder of a workspace; raise what it raises, or `NobodyHome` if there is no holder.

    The descriptors that come along belong to the caller. A holder that goes while it is asked is `Unavailable`: what
    was asked may have been done or not.
    """
    message = packed(request, most=_MOST_ASKED_BYTES)
    with await _connected(folder) as peer:
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_sendall(peer, message)
                return await receive_answer(peer, most=_MOST_ANSWERED_BYTES)
        except TimeoutError:
            raise Unavailable(f"the workspace's holder gave no answer in {timeout_s:g} s", hint="try again") from None
        except (EOFError, OSError) as error:
            raise Unavailable(
                "the workspace's holder went before it answered", hint="look at what was done, and try again"
            ) from error
        except (ValueError, RecursionError) as error:
            raise Defect(f"the workspace's holder gave an answer that is none: {error}") from error


def _hang(folder: int, listener: socket.socket) -> None:
    """Listen under another name and then take the door's: whoever knocks finds the old door or the new one."""
    new = f"{_NAME}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=folder)
    # By descriptor, as a socket's path has room for a hundred characters.
    listener.bind(f"/proc/self/fd/{folder}/{new}")
    os.chmod(new, 0o600, dir_fd=folder)
    listener.listen(_MOST_UNHEARD)
    listener.setblocking(False)
    os.rename(new, _NAME, src_dir_fd=folder, dst_dir_fd=folder)


async def _connected(folder: Path) -> socket.socket:
    """Knock, and wait for the greeting."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.setblocking(False)
    try:
        async with asyncio.timeout(_ASK_S):
            await _knock(peer, folder)
            if (owner := _uid_of(peer)) != os.geteuid():
                raise Denied(f"{folder} is held by the user {owner}", hint="work as that user")
            if await asyncio.get_running_loop().sock_recv(peer, 1) != _GREETING:
                raise NobodyHome(f"the holder of {folder} is about to let go", hint="try again")
    except BaseException as error:
        peer.close()
        match error:
            case TimeoutError():
                raise Unavailable(f"the holder of {folder} does not come to its door", hint="end it") from None
            case PermissionError():
                raise Denied(f"{folder} is held by another user", hint="work as that user") from error
            case FileNotFoundError() | NotADirectoryError() | ConnectionError():
                raise NobodyHome(f"nobody holds {folder}", hint="hold it here") from error
            case _:
                raise
    return peer


async def _knock(peer: socket.socket, folder: Path) -> None:
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                peer.connect(f"/proc/self/fd/{fd}/{_NAME}")
            except BlockingIOError:  # too many wait there; unlike with other sockets, nothing has begun
                await asyncio.sleep(_REST_S)
            else:
                return
    finally:
        os.close(fd)


def _uid_of(peer: socket.socket) -> int:
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)
