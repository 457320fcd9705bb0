"""The folders that workspaces are made of.

A tree is written by one workspace until it is sealed, and from then on read by any number. Beside the folder itself,
`tree/`, lie one for the kernel's use, `work/`, and a note, `tree.json`: which workspace made it, and how large it is
once that is known. A tree comes into being in one step, by its name, and goes in one step, by losing it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skep.errors import StorageFull, WorkspaceDamaged
from skep.sandbox.census import Census, Usage
from skep.sandbox.claim import Owner, claim
from skep.sandbox.erase import erase
from skep.workspace.faults import explained
from skep.workspace.manifest import DRAFT, put, sync

_TRASH = ".old-"
#: In place of a workspace's birth: the tree holds nothing of anybody's yet.
NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class Note:
    """What is known about a tree. `birth` is that of the workspace that made it."""

    birth: str = ""
    usage: Usage | None = None
    #: Room, of what `usage` counts, that it shares with other trees, by their ids.
    shared: dict[str, int] = field(default_factory=dict)

    def dump(self) -> bytes:
        body: dict[str, Any] = {"v": 1, "birth": self.birth, "shared": self.shared}
        if self.usage is not None:
            body.update(bytes=self.usage.size, inodes=self.usage.inodes)
        return json.dumps(body).encode()

    @classmethod
    def read(cls, path: Path) -> Note:
        """Read a note; one that cannot be read says nothing."""
        try:
            body = json.loads(path.read_bytes())
            usage = Usage(int(body["bytes"]), int(body["inodes"])) if "bytes" in body else None
            return cls(str(body["birth"]), usage, {str(tree): int(size) for tree, size in body["shared"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()


class Trees:
    """All trees of one home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tree(self, tree_id: str) -> Path:
        return self.folder / tree_id / "tree"

    def work(self, tree_id: str) -> Path:
        return self.folder / tree_id / "work"

    def beside(self, tree_id: str, name: str) -> Path:
        """Return where a file about a tree is kept: outside of what a sandbox sees of it."""
        return self.folder / tree_id / name

    def new(
        self,
        tree_id: str | None = None,
        *,
        birth: str,
        owner: Owner | None = None,
        fill: Callable[[Path, Owner | None], Note | None] | None = None,
        lasting: bool = True,
    ) -> str:
        """Make a tree and return its id. It belongs to `owner`; without one, as root, to a new user of its own.

        `fill` puts something into it, and may say how large that is. A tree that cannot be filled is not made. A tree
        that is not `lasting` is there after a power cut only if `settle` was called in between.
        """
        tree_id = tree_id or secrets.token_hex(8)
        draft = self.folder / f"{DRAFT}{tree_id}"
        with explained(str(self.folder)):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._furnish(draft, birth, owner, fill)
                draft.rename(self.folder / tree_id)
                if lasting:
                    sync(self.folder)
            except BaseException:
                _remove(draft)
                raise
        return tree_id

    def _furnish(
        self,
        draft: Path,
        birth: str,
        owner: Owner | None,
        fill: Callable[[Path, Owner | None], Note | None] | None,
    ) -> None:
        for folder in (draft, draft / "tree", draft / "work"):
            folder.mkdir(mode=0o700)
        if owner is None:
            fd, owner = claim(str(draft / "tree"))
            os.close(fd)
        if owner is not None:
            for folder in (draft / "tree", draft / "work"):
                os.chown(folder, *owner)
        note = fill(draft / "tree", owner) if fill else None
        (draft / "tree.json").write_bytes(Note(birth, note.usage if note else None, note.shared if note else {}).dump())

    def settle(self) -> None:
        """Wait until the trees that were made are on the disk."""
        with explained(str(self.folder)):
            sync(self.folder)

    def owner(self, tree_id: str) -> Owner | None:
        """Return the user that a tree belongs to, as one to be handed on; None when Skep is an ordinary user."""
        if os.geteuid() != 0:
            return None
        with explained(f"tree {tree_id}"):
            found = self.tree(tree_id).stat()
        return found.st_uid, found.st_gid

    def empty(self, tree_id: str) -> bool:
        with explained(f"tree {tree_id}"), os.scandir(self.tree(tree_id)) as entries:
            return next(entries, None) is None

    def note(self, tree_id: str) -> Note:
        return Note.read(self.beside(tree_id, "tree.json"))

    def weigh(self, sealed: Iterable[str]) -> Usage:
        """Say how much room some sealed trees take together; each is counted once in its life."""
        wanted = set(sealed)
        total = Usage(0, 0)
        for tree_id in wanted:
            note = self._weighed(tree_id)
            assert note.usage is not None
            shared = sum(size for other, size in note.shared.items() if other in wanted)
            total += Usage(max(note.usage.size - shared, 0), note.usage.inodes)
        return total

    def _weighed(self, tree_id: str) -> Note:
        note = self.note(tree_id)
        if note.usage is None:
            with explained(f"tree {tree_id}"):
                fd = os.open(self.tree(tree_id), os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    note = Note(note.birth, Census.take(fd), note.shared)
                finally:
                    os.close(fd)
            self.annotate(tree_id, note)
        return note

    def annotate(self, tree_id: str, note: Note) -> None:
        """Write down what is known of a tree, if there is room for it."""
        with suppress(StorageFull):
            put(self.beside(tree_id, "tree.json"), note.dump(), lasting=False)

    def check(self, wanted: Iterable[str]) -> None:
        """Raise `WorkspaceDamaged` if one of these trees is missing."""
        for tree_id in wanted:
            if not self.tree(tree_id).is_dir():
                raise WorkspaceDamaged(
                    f"the folder {self.tree(tree_id)} is missing",
                    hint="restore it from a backup of the disk, or the workspace from an archive",
                )

    def all(self) -> set[str]:
        """Return the ids of all trees that are whole."""
        with suppress(FileNotFoundError):
            return {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}
        return set()

    def drop(self, gone: Iterable[str]) -> None:
        """Take the names from some trees: at once they are no trees any more. `clear` frees their room."""
        for tree_id in gone:
            with suppress(FileNotFoundError):
                (self.folder / tree_id).rename(self.folder / f"{_TRASH}{tree_id}-{secrets.token_hex(4)}")

    def drop_drafts(self) -> None:
        """Do away with trees that were never finished. Only for who is alone: others may be at it."""
        for draft in self.folder.glob(f"{DRAFT}*"):
            draft.rename(self.folder / f"{_TRASH}{draft.name}-{secrets.token_hex(4)}")

    def clear(self) -> None:
        """Remove what has lost its name."""
        for folder in self.folder.glob(f"{_TRASH}*"):
            _remove(folder)


def _remove(folder: Path) -> None:
    with suppress(OSError):  # what stays is removed by the next sweep
        erase(str(folder), folder.lstat().st_ino)
