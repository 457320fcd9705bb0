"""A connection to a server inside, carried by the conversation with its twin."""

from __future__ import annotations

import os
import socket

from skep.errors import NotFound
from skep.sandbox.twin.answer import Answer
from skep.sandbox.twin.conversation import Conversation
from skep.sandbox.twin.inside import wire
from skep.sandbox.twin.pulled import Carried, Inflow, Outflow


class TwinTunnel:
    """One connection; it ends when both directions have, or with the sandbox."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._answer = Answer()
        self._number = conversation.open(self)
        self._inflow = Inflow(conversation, lambda: self._number, wire.BOTH)
        self._outflow = Outflow(conversation, lambda: self._number)

    @classmethod
    async def open(cls, conversation: Conversation, port: int) -> socket.socket:
        """Connect to a port on loopback inside, and return a socket that does not block."""
        tunnel = cls(conversation)
        conversation.say(wire.CONNECT, tunnel._number, wire.COUNTED.pack(port))
        try:
            answer = await tunnel._answer.given()
        except BaseException:
            tunnel._release()
            raise
        if answer.failure is not None:
            tunnel._release()
            raise NotFound(
                f"nothing answers on port {port} in the sandbox: {os.strerror(answer.failure.errno)}",
                hint="start the server, and let it listen on 127.0.0.1 inside",
            )
        return Carried(tunnel._inflow, tunnel._outflow, finished=tunnel._release).end

    def hear(self, kind: int, payload: bytes) -> None:
        match kind:
            case wire.DATA:
                self._inflow.put(payload[wire.STREAM.size :])
            case wire.END:
                self._inflow.end()
            case wire.TAKEN:
                self._outflow.taken(payload)
            case wire.CLOSED:
                self._outflow.close()
            case _:
                self._answer.hear(kind, payload)

    def lose(self) -> None:
        self._answer.lose()
        self._inflow.end()
        self._outflow.close()

    def _release(self) -> None:
        self._conversation.say(wire.RELEASE, self._number)
        self._conversation.forget(self._number)
