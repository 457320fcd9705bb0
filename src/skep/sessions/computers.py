"""What sessions need of the place where workspaces are kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from skep.sandbox.sandbox import Sandbox
from skep.sessions.session import Session

if TYPE_CHECKING:
    from skep.workspace.packages.packages import Installed

Condition = Literal["ready", "half-made", "damaged", "missing"]


@dataclass(frozen=True, slots=True)
class Mended:
    """What a repair has put right, and what of the workspace is lost."""

    done: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class Held(Protocol):
    """A workspace in this process's hands."""

    async def sandbox(self) -> Sandbox:
        """Return the sandbox over it, started if none runs."""

    async def stop(self) -> None:
        """End the sandbox, if one runs. The workspace stays in these hands."""

    async def leave(self) -> None:
        """End the sandbox under whoever has joined it, and let nobody join any more."""


class Computers(Protocol):
    """Makes, opens and puts away the computers of sessions; a session's id is that of its workspace."""

    async def condition(self, session: Session) -> Condition:
        """Say in which state the workspace lies on this host."""

    async def make(self, session: Session) -> None:
        """Make the workspace; one that was left half-made is finished."""

    def hold(self, session: Session) -> AbstractAsyncContextManager[Held]:
        """Take the workspace into this process's hands; `WorkspaceBusy` if another process has it."""

    def join(self, session: Session) -> AbstractAsyncContextManager[Sandbox]:
        """Use the sandbox that another process of this host runs over it."""

    async def hand_over(self, session: Session) -> None:
        """Ask the process of this host that has the workspace to stop its sandbox and let it go."""

    async def install(self, session: Session, *, python: Sequence[str], node: Sequence[str]) -> Installed:
        """Install packages into the workspace, here or in the process of this host that has it."""

    async def mend(self, session: Session) -> Mended:
        """Repair the workspace from its template, its manifest and its last good state."""

    async def save(self, session: Session) -> str:
        """Save the workspace to the archive; return what to ask for to get it back."""

    async def free(self, session: Session) -> None:
        """Remove the workspace from this host, given that it is saved; harmless if it is gone."""

    async def unarchive(self, session: Session, archive: str) -> None:
        """Bring the workspace back."""

    async def destroy(self, session: Session) -> None:
        """Remove the workspace and its archive for good; harmless if there is none."""
