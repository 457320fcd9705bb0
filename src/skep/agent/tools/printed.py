"""What a program printed, made into the fields of an observation."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from skep.agent.actions import Action
from skep.agent.bounds import keep
from skep.agent.observations import Trouble

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Execution
    from skep.sessions.computer import Computer


async def printed(computer: Computer, action: Action, done: Execution) -> dict[str, Any]:
    """Return the fields of an observation that say what was printed."""
    stdout, stderr = _joined(done.stdout, done.stdout_end), _joined(done.stderr, done.stderr_end)
    return asdict(await keep(computer, action.stamp.call, stdout, stderr, cut=done.truncated))


def _joined(head: bytes, end: bytes) -> str:
    between = b"\n[\xe2\x80\xa6 more was printed here than is kept \xe2\x80\xa6]\n" if end else b""
    return (head + between + end).decode(errors="replace")


def trouble(action: Action, failure: str, message: str, **fields: Any) -> Trouble:
    return Trouble.model_validate(
        {"stamp": action.stamp, "failure": failure, "tool": action.kind, "message": message, **fields}
    )
