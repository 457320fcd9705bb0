"""A built environment: a folder that workspaces have as their lowest layer, and what is known about it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from skep.errors import NotFound, WorkspaceDamaged
from skep.state.names import shown
from skep.workspace.manifest import put
from skep.workspace.snapshot.turn import shared

RECORD = "snapshot.json"
LOG = "build.log"
_VERSION = re.compile(r"v([0-9]{4,9})-[0-9a-f]{12}")
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One built version of a template. Its tree is never written again."""

    template: str
    version: str
    folder: Path
    #: SHA-256 over the recipe and everything that was chosen for it: the same hash is the same content.
    hash: str
    #: Which Python and Node it was built for, and what was installed.
    python: str | None
    python_packages: Mapping[str, str]
    node: str | None
    node_packages: Mapping[str, str]
    built_at: datetime
    size_bytes: int
    files: int = 0
    #: `Template.recipe_hash` of the template as it was then.
    recipe: str = ""
    #: Variables that programs over this snapshot should have.
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def log(self) -> Path:
        return self.folder / LOG

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep it from being collected; NotFound if it has been."""
        lock = self.folder / "lock"
        if not self.folder.is_dir():
            raise _gone(self.template, self.version)
        with ExitStack() as held:
            try:
                # Whoever collects holds it for a moment only: until the folder has another name, which this notices.
                fd = held.enter_context(shared(lock))
                same = os.path.samestat(os.fstat(fd), lock.stat())
            except (WorkspaceDamaged, FileNotFoundError) as error:
                raise _gone(self.template, self.version) from error
            if not same:
                raise _gone(self.template, self.version)
            yield


class Record(BaseModel):
    """A snapshot as it is written beside its tree."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1] = 1
    template: str
    version: str
    hash: str
    recipe: str
    python: str | None
    python_packages: dict[str, str]
    node: str | None
    node_packages: dict[str, str]
    built_at: datetime
    size_bytes: int
    files: int
    environment: dict[str, str] = {}


def write(folder: Path, record: Record) -> None:
    put(folder / RECORD, record.model_dump_json(indent=1).encode() + b"\n")


def read(folder: Path) -> Snapshot:
    """Read what is known of the snapshot in a folder, whose name is its version."""
    path = folder / RECORD
    try:
        record = Record.model_validate_json(path.read_bytes()[:_MOST_BYTES])
    except FileNotFoundError as error:
        raise _gone(folder.parent.name, folder.name) from error
    except (OSError, ValidationError) as error:
        raise _damaged(path, "cannot be read") from error
    if record.version != folder.name or not (folder / "tree").is_dir():
        raise _damaged(path, "does not belong to what lies beside it")
    fields = record.model_dump(exclude={"v"})
    return Snapshot(folder=folder, **fields)


def number(version: str) -> int:
    """Return the number of a version, or 0 for what is none."""
    found = _VERSION.fullmatch(version)
    return int(found[1]) if found else 0


def _gone(template: str, version: str) -> NotFound:
    return NotFound(
        f"there is no version {shown(version)} of the template {template}", hint=f"skep template versions {template}"
    )


def _damaged(path: Path, what: str) -> WorkspaceDamaged:
    return WorkspaceDamaged(
        f"{path} {what}", hint=f"build it again: skep template build {path.parent.parent.name} --fresh"
    )
