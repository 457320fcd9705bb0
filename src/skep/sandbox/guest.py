"""A guest: another process that a sandbox's holder lets run commands in it. This is the holder's side."""

from __future__ import annotations

import socket
from typing import get_args

from skep.sandbox.agent import Agent
from skep.sandbox.limits import LimitName
from skep.sandbox.sandbox import Exit

_LIMIT_NAMES: tuple[LimitName, ...] = get_args(LimitName)


class Guest:
    """One guest. To the watcher it is something that runs, as long as it is there: what it starts is not seen here."""

    def __init__(self, agent: Agent) -> None:
        self.exit: Exit | None = None
        self._agent = agent
        self._name = 0

    @classmethod
    async def admit(cls, agent: Agent) -> tuple[Guest, socket.socket]:
        """Have the agent serve somebody else too; return the connection that is to be handed over."""
        guest = cls(agent)
        control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with inside:
            try:
                guest._name = await agent.admit(inside, guest._on_left)
            except BaseException:
                control.close()
                raise
        return guest, control

    def stop_for(self, limit: LimitName) -> None:
        """End all that the guest has started because of a limit, which it is told."""
        self._agent.end_for_guest(self._name, _LIMIT_NAMES.index(limit) + 1)

    def _on_left(self) -> None:
        self.exit = Exit(code=0)


def told_limit(cause: int) -> LimitName | None:
    """Return the limit that a holder meant with the cause of an end."""
    return _LIMIT_NAMES[cause - 1] if 0 < cause <= len(_LIMIT_NAMES) else None
