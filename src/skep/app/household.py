"""What a hive finds in its workspace beside its own files: its memory, its skills, a ticket it shares with others.

These folders lie on the host, apart from the workspace. A sandbox shows them; only the ticket can be written there.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from skep.agent.scratchpad import CLOSE, OPEN
from skep.sandbox.claim import claim
from skep.sandbox.stack import Mount
from skep.state.names import check_name
from skep.workspace.faults import explained

#: Where a hive finds its own folder and a ticket.
HIVE = "/workspace/hive"
TICKET = "/workspace/ticket"
#: The part of MEMORY.md that the hive's own workers write.
SCRATCHPAD = f"{OPEN}\n{CLOSE}\n"


@dataclass(frozen=True, slots=True)
class Household:
    """The folders of one hive on this machine."""

    home: Path
    hive_id: str
    account_id: str
    name: str

    @property
    def folder(self) -> Path:
        """What is shown at /workspace/hive."""
        return self.home / "hives" / self.hive_id

    @property
    def skills(self) -> dict[str, Path]:
        """The three shelves of skills by their names: everybody's, the account's and the hive's own."""
        return {
            "system": self.home / "skills",
            "account": self.home / "accounts" / self.account_id / "skills",
            "hive": self.folder / "skills" / "hive",
        }

    def settle(self) -> None:
        """Make what is missing; what is there stays as it is."""
        with explained(f"the folder {self.folder}"):
            for folder in (self.folder / "memory", *self.skills.values()):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for shelf in self.skills:  # the mount points: nothing can be made in a folder that is shown read-only
                (self.folder / "skills" / shelf).mkdir(mode=0o700, exist_ok=True)
            _write_new(
                self.folder / "MEMORY.md", f"# Memory of {self.name}\n\nNothing is remembered yet.\n\n{SCRATCHPAD}"
            )
            about = f'id = "{self.hive_id}"\nname = "{self.name}"\naccount = "{self.account_id}"\n'
            _write_new(self.folder / ".hive.toml", about)

    def mounts(self) -> tuple[Mount, ...]:
        """Return what every sandbox of the hive shows, for reading alone."""
        shelves = [Mount(str(self.skills[shelf]), f"{HIVE}/skills/{shelf}") for shelf in ("system", "account")]
        return (Mount(str(self.folder), HIVE), *shelves)


def ticket(home: Path, account_id: str, name: str) -> Mount:
    """Show the folder that all hives of an account share under a name, made if it is missing.

    When Skep is root the folder has a user of its own, as whom every sandbox writes there: the kernel maps each
    sandbox's user to it, so that hives can change each other's files and nothing belongs to root.
    """
    folder = home / "tickets" / account_id / check_name("ticket", name)
    fd, _ = claim(str(folder))
    os.close(fd)
    return Mount(str(folder), TICKET, "read-write")


def _write_new(file: Path, text: str) -> None:
    """Write a file unless it is there. It appears with its whole text."""
    if file.exists():
        return
    draft = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    draft.write_text(text)
    with suppress(FileExistsError):  # another process was faster
        os.link(draft, file)
    draft.unlink()
