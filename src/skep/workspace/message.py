"""What is said through a workspace's door: JSON with its length in front, descriptors with the first byte, errors."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from skep import errors
from skep.errors import Defect, LimitReached, SkepError

MOST_FDS = 8
_HEAD = struct.Struct(">I")
_DESCRIPTOR = struct.Struct("=i")
_PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class Answer:
    """What a holder says. The descriptors belong to whoever has the answer; a door closes those that it hands out."""

    body: dict[str, Any]
    fds: tuple[int, ...] = ()

    @contextmanager
    def closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            _close(self.fds)


class Failure(BaseModel):
    """An error of Skep's own, on its way from one process to another."""

    model_config = ConfigDict(frozen=True)

    type: str
    message: str
    hint: str | None = None

    @classmethod
    def of(cls, error: SkepError) -> Failure:
        """Describe an error by the nearest kind that every Skep knows."""
        known = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        message, hint = (
            text and text.encode(errors="backslashreplace").decode() for text in (error.message, error.hint)
        )
        return cls(type=known.__name__, message=message or "", hint=hint)

    def error(self) -> SkepError:
        kind = getattr(errors, self.type, None)
        known = kind if isinstance(kind, type) and issubclass(kind, SkepError) else SkepError
        return known(self.message, hint=self.hint)


class Said(BaseModel):
    """An answer as it travels: a failure, or a body and the number of descriptors that came before it."""

    body: dict[str, Any] = {}
    fds: int = 0
    failure: Failure | None = None


def packed(message: dict[str, Any], *, most: int) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > most:
        raise LimitReached(f"{len(body)} bytes do not fit through the door of a workspace", hint="ask for less at once")
    return _HEAD.pack(len(body)) + body


async def receive(peer: socket.socket, *, most: int, first: bytes = b"") -> dict[str, Any]:
    """Read one message, of which some bytes may have been read; what is none is a `ValueError`, or too deep."""
    (size,) = _HEAD.unpack(first + await _exactly(peer, _HEAD.size - len(first)))
    if size > most:
        raise ValueError(f"{size} bytes are too many")
    said = json.loads(await _exactly(peer, size))  # pydantic's own parser refuses names of files that are no UTF-8
    if not isinstance(said, dict):
        raise ValueError("not an object")  # noqa: TRY004 - bytes from outside, not a caller's mistake
    return said


async def _exactly(peer: socket.socket, size: int) -> bytes:
    """Read so many bytes, with room for no more than have come."""
    loop = asyncio.get_running_loop()
    read = bytearray()
    while len(read) < size:
        piece = await loop.sock_recv(peer, min(_PIECE, size - len(read)))
        if not piece:
            raise EOFError("the other side hung up")
        read += piece
    return bytes(read)


async def send_answer(peer: socket.socket, answer: Answer, *, most: int) -> None:
    """Send an answer with its descriptors."""
    if len(answer.fds) > MOST_FDS:
        raise Defect(f"a door hands out no more than {MOST_FDS} descriptors at once")
    message = packed({"body": answer.body, "fds": len(answer.fds)}, most=most)
    # The first byte finds room: nothing but a greeting has been sent on this connection.
    socket.send_fds(peer, [message[:1]], list(answer.fds))
    await asyncio.get_running_loop().sock_sendall(peer, message[1:])


async def send_failure(peer: socket.socket, error: SkepError, *, most: int) -> None:
    message = packed({"failure": Failure.of(error).model_dump()}, most=most)
    await asyncio.get_running_loop().sock_sendall(peer, message)


async def receive_answer(peer: socket.socket, *, most: int) -> Answer:
    """Return an answer, or raise the error that was sent in place of one."""
    first, fds = await _receive_first(peer)
    try:
        said = Said.model_validate(await receive(peer, most=most, first=first))
        if said.failure is not None:
            raise said.failure.error()
        if said.fds != len(fds):
            raise LimitReached("descriptors did not arrive", hint="raise this process's limit of open files")
        return Answer(said.body, fds)
    except BaseException:
        _close(fds)
        raise


async def _receive_first(peer: socket.socket) -> tuple[bytes, tuple[int, ...]]:
    """Receive the first byte of an answer with its descriptors, which no child inherits."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(peer, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(peer)
    room = socket.CMSG_LEN(MOST_FDS * _DESCRIPTOR.size)
    data, attached, _, _ = peer.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    fds = tuple(
        fd
        for level, kind, numbers in attached
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _DESCRIPTOR.iter_unpack(numbers)
    )
    return data, fds


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
