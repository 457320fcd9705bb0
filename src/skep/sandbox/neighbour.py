"""Use a sandbox over a byte stream that another process holds: the guest's side of `twin.guest`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from skep.errors import SandboxLost
from skep.sandbox.joining import JoinedSandbox, Visiting, join, understood
from skep.sandbox.limits import Limits
from skep.sandbox.link import Housing
from skep.sandbox.recipe import Recipe
from skep.sandbox.stream import StreamSandbox
from skep.sandbox.twin.conversation import Conversation
from skep.sandbox.twin.guest import SocketLink
from skep.sandbox.twin.inside import wire

_READY_S = 10.0
_PATIENCE_S = 30.0


class StreamIntroduction(BaseModel):
    """What a holder tells of a sandbox over a byte stream."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1]
    over: Literal["stream"]
    id: str
    limits: Limits
    environment: dict[str, str]
    fakeroot: str
    home: str
    cache: str
    kernels: str


class _Talk(Conversation):
    """A conversation by way of a holder, which is told of everything that is over."""

    def forget(self, number: int) -> None:
        super().forget(number)
        self.say(wire.RELEASE, number)


class _Next(Housing):
    """The house of a neighbour. Whether it stands is seen by the stream alone, and ending it is the neighbour's."""

    def __init__(self, number: str) -> None:
        self.id = number

    async def alive(self) -> bool:
        return True

    async def end(self) -> None:
        return


async def visit(control: socket.socket, introduction: Mapping[str, Any]) -> JoinedSandbox | NeighbourSandbox:
    """Use a sandbox of any mechanism through a connection that its holder made; takes the connection over."""
    if introduction.get("over") != "stream":
        return await join(control, introduction)
    try:
        told = understood(StreamIntroduction, introduction)
    except BaseException:
        control.close()
        raise
    return await NeighbourSandbox.join(control, told)


class NeighbourSandbox(Visiting, StreamSandbox):
    """A sandbox of another process. Leaving it, or dying, ends the commands that were started here and no others."""

    mechanism: ClassVar[str] = "joined"

    @classmethod
    async def join(cls, control: socket.socket, told: StreamIntroduction) -> NeighbourSandbox:
        """Use a sandbox through a connection that its holder made; takes the connection over."""
        talk = _Talk(SocketLink(control))
        try:
            async with asyncio.timeout(_READY_S):
                await talk.begin()
        except TimeoutError as error:
            await talk.close()
            raise SandboxLost("the sandbox does not answer", hint="end the process that holds the workspace") from error
        except BaseException:
            await talk.close()
            raise
        joined = cls(
            talk,
            _Next(told.id),
            Recipe(limits=told.limits),
            environment=told.environment,
            fakeroot=told.fakeroot,
            patience_s=_PATIENCE_S,
        )
        joined.home, joined.cache, joined.kernels = told.home, told.cache, told.kernels
        return joined

    def _is_lost(self) -> bool:
        return self._conversation.lost.is_set()
