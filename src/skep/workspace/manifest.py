"""The manifest of a workspace: which folders it is made of, and what is known about it.

One file decides what a workspace is. It is replaced in one step, so that a crash leaves the old workspace or the new
one, and it carries a hash of itself, so that one that was cut short or changed by hand is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, StringConstraints, ValidationError

from skep.errors import InvalidRequest, NotFound, WorkspaceDamaged
from skep.sandbox.stack import Mount
from skep.workspace.faults import explained

NAME = "workspace.json"
#: Written last: a folder without it is a workspace that never became ready.
MARK = ".workspace_configured"
#: Begins the name of a file that is not finished.
DRAFT = ".new-"
VERSION = 1
_MOST_BYTES = 16 << 20
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")

TreeId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
WorkspaceId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
PathPart = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Packages(_Part):
    """What was installed on demand, as it was asked for."""

    python: tuple[str, ...] = ()
    node: tuple[str, ...] = ()


class Shown(_Part):
    """A folder of the host that every sandbox over the workspace shows."""

    host: str
    inside: str
    mode: Literal["read-only", "read-write", "scratch"] = "read-only"

    def mount(self) -> Mount:
        return Mount(self.host, self.inside, self.mode)


class State(_Part):
    """What a workspace holds at one moment: sealed trees, the uppermost first, and whether the snapshot is below."""

    layers: tuple[TreeId, ...] = ()
    #: False for a workspace into which the snapshot was copied, or that never had one.
    based: bool = False
    snapshot_version: PathPart | None = None
    packages: Packages = Packages()


class Checkpoint(_Part):
    """A state that can be returned to."""

    id: str
    name: str | None = None
    note: str = ""
    created_at: datetime
    state: State

    @property
    def title(self) -> str:
        return f"{self.id} ({self.name})" if self.name else self.id


class Out(_Part):
    """Where the files of a workspace are while a sandbox elsewhere has them; those here are older then."""

    mechanism: PathPart
    #: The machine's id there, once there is one, and a word by which it is found among others.
    machine: str | None = None
    mark: TreeId
    #: On the way there the files here are still the newest, and once they are back they are again.
    stage: Literal["going", "out", "back"] = "going"
    #: When the files here were last what they are there.
    copied_at: datetime


class Manifest(_Part):
    """All that is known about one workspace. `generation` grows with every change."""

    v: Literal[1] = 1
    id: WorkspaceId
    #: A random number given at creation: trees know by it whose they are, when another has the same id.
    birth: TreeId
    template: PathPart
    #: The tree that is written.
    upper: TreeId
    #: What lies below it.
    below: State
    checkpoints: tuple[Checkpoint, ...] = ()
    parent: WorkspaceId | None = None
    created_at: datetime
    generation: int = 0
    suspended: bool = False
    shown: tuple[Shown, ...] = ()
    #: Whose it is, in the words of whoever had it made; a fork has none.
    labels: dict[str, str] = {}
    #: Trees that it needed once and has let go of.
    dropped: tuple[TreeId, ...] = ()
    #: The journal of an install that has not ended; None between installs.
    installing: dict[str, JsonValue] | None = None
    #: Where its files are, if not here.
    out: Out | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        return self.below.layers

    @property
    def snapshot_version(self) -> str | None:
        return self.below.snapshot_version

    @property
    def packages(self) -> Packages:
        return self.below.packages

    def trees(self) -> set[str]:
        """Return every tree that it needs."""
        return {self.upper, *self.sealed()}

    def sealed(self) -> set[str]:
        """Return every tree that it needs and never writes."""
        states = (self.below, *(checkpoint.state for checkpoint in self.checkpoints))
        return {tree for state in states for tree in state.layers}

    def snapshots(self) -> set[tuple[str, str]]:
        """Return the snapshots that it needs, as template and version."""
        states = (self.below, *(checkpoint.state for checkpoint in self.checkpoints))
        return {(self.template, state.snapshot_version) for state in states if state.snapshot_version}

    def changed(self, **changes: Any) -> Manifest:
        """Return the next manifest; fields of `below` may be given by their own names."""
        known = State.model_fields.keys() & changes.keys()
        if known:
            changes["below"] = self.below.model_copy(update={name: changes.pop(name) for name in known})
        after = self.model_copy(update={**changes, "generation": self.generation + 1})
        dropped = ({*self.dropped} | self.trees()) - after.trees()
        return after.model_copy(update={"dropped": tuple(sorted(dropped))})

    def checkpoint(self, name: str) -> Checkpoint:
        """Find a checkpoint by its id, or the newest by its name."""
        for checkpoint in reversed(self.checkpoints):
            if name in (checkpoint.id, checkpoint.name):
                return checkpoint
        there = ", ".join(checkpoint.title for checkpoint in self.checkpoints[-5:]) or "there are none"
        raise NotFound(f"workspace {self.id} has no checkpoint {name[:60]!a}", hint=f"its latest checkpoints: {there}")


def check_id(value: str) -> str:
    """Return the id of a workspace if it is fit to be one."""
    if _ID.fullmatch(value) is None:
        raise InvalidRequest(
            f"not a valid id of a workspace: {value[:60]!a}",
            hint="use 1 to 63 lower-case letters, digits and hyphens, beginning with a letter or a digit",
        )
    return value


def dump(manifest: Manifest) -> bytes:
    body = manifest.model_dump(mode="json")
    if manifest.out is None:  # so that an older Skep reads it, unless it must not use what is here
        del body["out"]
    return json.dumps({**body, "sha256": _hash(body)}, indent=1).encode() + b"\n"


def parse(text: bytes, *, where: str) -> Manifest:
    """Read a manifest from its text; what is cut short, altered or too new is `WorkspaceDamaged`."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(where, "is cut short or not JSON") from error
    if not isinstance(body, dict):
        raise damaged(where, "is not a manifest")
    if isinstance(body.get("v"), int) and body["v"] > VERSION:
        raise WorkspaceDamaged(
            f"{where} was written by a newer Skep (version {body['v']}; this one reads {VERSION})", hint="upgrade Skep"
        )
    if body.pop("sha256", None) != _hash(body):
        raise damaged(where, "does not match its own hash")
    try:
        return Manifest.model_validate(body)
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"]))
        raise damaged(where, f"has a wrong value for {field}") from error


def damaged(where: str, what: str) -> WorkspaceDamaged:
    return WorkspaceDamaged(
        f"{where} {what}", hint="`skep workspace repair` writes it again from the copy that is kept beside the files"
    )


def _hash(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def read(folder: Path) -> Manifest:
    """Read the manifest in a folder."""
    path = folder / NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise damaged(str(path), "is missing") from error
    except OSError as error:
        raise damaged(str(path), f"cannot be read: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        return parse(file.read(_MOST_BYTES), where=str(path))


def write(folder: Path, manifest: Manifest, *, first: bool = False) -> None:
    """Replace the manifest in a folder; when this returns, a power cut does not bring the old one back.

    The `first` one of a workspace need not last by itself: `mark` comes after it.
    """
    put(folder / NAME, dump(manifest), lasting="data" if first else True)


def mark(folder: Path) -> None:
    """Make a folder with a manifest the folder of a workspace; from then on it is one, through a power cut too."""
    with explained(str(folder)):
        (folder / MARK).touch(mode=0o600)  # empty, so it is there or it is not
        sync(folder)


def put(path: Path, data: bytes, *, lasting: bool | Literal["data"] = True) -> None:
    """Replace a file in one step; `lasting` also waits until it is on the disk, or its data without its name."""
    draft = path.with_name(f"{DRAFT}{secrets.token_hex(8)}")
    with explained(str(path)):
        try:
            with open(draft, "xb") as file:
                file.write(data)
                file.flush()
                if lasting:
                    os.fsync(file.fileno())
            draft.rename(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        if lasting is True:
            sync(path.parent)


def clear_drafts(folder: Path) -> None:
    """Remove files that a crash left unfinished. Only for who alone writes there."""
    for draft in folder.glob(f"{DRAFT}*"):
        with suppress(OSError):
            draft.unlink()


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
