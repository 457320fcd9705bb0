"""What a program printed, made into an observation; and what can be told from it."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from skep.agent.actions import Action
from skep.agent.bounds import keep
from skep.agent.observations import Trouble

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Execution
    from skep.sessions.computer import Computer

_MISSING = re.compile(r"No module named '?([A-Za-z_][A-Za-z0-9_]{0,80})")
_LOOKED_AT = 64 << 10


def missing_packages(text: str) -> tuple[str, ...]:
    """Return the Python packages that an output complains about; modules of Python itself are none."""
    found = dict.fromkeys(_MISSING.findall(text[-_LOOKED_AT:]))
    return tuple(name for name in found if name not in sys.stdlib_module_names)[:10]


async def printed(computer: Computer, action: Action, done: Execution) -> dict[str, Any]:
    """Return the fields of an observation that say what was printed."""
    stdout, stderr = _joined(done.stdout, done.stdout_end), _joined(done.stderr, done.stderr_end)
    return asdict(await keep(computer, action.stamp.call, stdout, stderr, cut=done.truncated))


def _joined(head: bytes, end: bytes) -> str:
    between = b"\n[\xe2\x80\xa6 more was printed here than is kept \xe2\x80\xa6]\n" if end else b""
    return (head + between + end).decode(errors="replace")


def failed_by_itself(
    action: Action, done: Execution, told: dict[str, Any], *, timeout_s: float | None = None
) -> Trouble | None:
    """Say whether it was the tool that failed, not what it ran: out of time (where nobody had set one), or lacking."""
    if done.exit.limit == "time" and timeout_s is not None:
        message = f"it was not done within {timeout_s:g} s and was ended"
        return trouble(action, "tool_timeout", message, exit_code=done.exit_code, **told)
    if not done.ok and (packages := missing_packages(done.error_text) or missing_packages(done.text)):
        message = f"a package is missing: {', '.join(packages)}"
        return trouble(action, "missing_package", message, exit_code=done.exit_code, packages=packages, **told)
    return None


def trouble(action: Action, failure: str, message: str, **fields: Any) -> Trouble:
    return Trouble.model_validate(
        {"stamp": action.stamp, "failure": failure, "tool": action.kind, "message": message, **fields}
    )
