"""The sandbox of whoever may have none: it can be made and stopped, and refuses everything else.

What stands on a sandbox (workspaces, sessions, checkpoints) goes on as ever; only what would run inside, or look there,
is refused, with a hint at how to switch it on.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterable, AsyncIterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from skep.errors import SandboxDisabled
from skep.sandbox.files import READ_LIMIT_BYTES, Change, Entry
from skep.sandbox.recipe import Recipe
from skep.sandbox.sandbox import Command, Process, Sandbox

if TYPE_CHECKING:
    from skep.sandbox.egress.policy import Policy
    from skep.sandbox.ports import Bounds, Exposure
    from skep.sandbox.stack import Stack

REASON = "sandboxes are switched off here"
HINT = 'set sandbox.mechanism to something else than "disabled"'


async def start(recipe: Recipe) -> Sandbox:
    """Make a sandbox that refuses everything; the options `reason` and `hint` say what it answers."""
    return DisabledSandbox(recipe)


class DisabledSandbox(Sandbox):
    """No sandbox: every call that needs one is `SandboxDisabled`."""

    mechanism: ClassVar[str] = "disabled"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.id = f"disabled-{secrets.token_hex(4)}"
        self.limits = recipe.limits
        self._reason = str(recipe.options.get("reason") or REASON)
        self._hint = str(recipe.options.get("hint") or HINT)
        self.files = DisabledFiles(self)

    def refuse(self) -> NoReturn:
        """Say why there is nothing to run in."""
        raise SandboxDisabled(self._reason, hint=self._hint)

    async def start(self, command: Command, **_: Any) -> Process:
        self.refuse()

    async def alive(self) -> bool:
        return False

    async def stop(self) -> None:
        """Do nothing: there is nothing to end."""

    async def pause(self) -> None:
        self.refuse()

    async def resume(self) -> None:
        self.refuse()

    async def kill_all(self) -> None:
        self.refuse()

    async def end_marked(self, run: str, *, within_s: float = 1.5) -> bool:
        self.refuse()

    async def set_policy(self, policy: Policy) -> None:
        self.refuse()

    async def restack(self, stack: Stack) -> None:
        self.refuse()

    async def admit(self) -> socket.socket:
        self.refuse()

    def introduction(self) -> dict[str, Any]:
        self.refuse()

    async def connect(self, port: int) -> socket.socket:
        self.refuse()

    async def expose(self, port: int, *, at: str = "127.0.0.1:0", bounds: Bounds | None = None) -> Exposure:
        self.refuse()


class DisabledFiles:
    """The files of no sandbox."""

    def __init__(self, sandbox: DisabledSandbox) -> None:
        self._sandbox = sandbox

    async def read(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        self._sandbox.refuse()

    def stream(self, path: str) -> AsyncIterator[bytes]:
        self._sandbox.refuse()

    async def write(self, path: str, data: bytes | str | AsyncIterable[bytes], *, mode: int | None = None) -> None:
        self._sandbox.refuse()

    async def append(self, path: str, data: bytes | str) -> None:
        self._sandbox.refuse()

    async def list(self, path: str = ".") -> list[Entry]:
        self._sandbox.refuse()

    async def stat(self, path: str) -> Entry:
        self._sandbox.refuse()

    async def move(self, source: str, target: str) -> None:
        self._sandbox.refuse()

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        self._sandbox.refuse()

    async def mkdir(self, path: str) -> None:
        self._sandbox.refuse()

    def watch(self, path: str = ".") -> AsyncIterator[Change]:
        self._sandbox.refuse()
