"""Bring a workspace into being, or take in a plain folder as one.

The manifest comes first, so that whatever is made after it is known to belong to it, and the mark comes last. Whoever
finds a manifest without a mark knows that nothing in it was ever used.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from skep.errors import Conflict, Unavailable, WorkspaceDamaged
from skep.sandbox.claim import Owner, claim
from skep.workspace import manifest as manifests
from skep.workspace.faults import explained
from skep.workspace.grounds import Grounds, lay_out, resemble
from skep.workspace.held import keep_copy, vouch
from skep.workspace.holding import Holding, Taken
from skep.workspace.layers.copying import Copying, flush
from skep.workspace.layers.trees import NOBODY, Note
from skep.workspace.manifest import MARK, Manifest, State
from skep.workspace.register import Register

_libc = ctypes.CDLL(None, use_errno=True)
_HERE, _EXCHANGE = -100, 2
_ENVIRONMENTS = (".venv", "node_modules")


def begin(register: Register, workspace_id: str) -> Holding:
    """Take the folder of a workspace to be; `Conflict` if it is one already."""
    path = register.path(workspace_id)
    try:
        with explained(str(path)):
            register.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            holding = Holding.take(path, make=True)
    except Taken:
        if register.condition(workspace_id) == "ready":
            raise _exists(workspace_id) from None
        raise
    try:
        if register.condition(workspace_id) == "unmarked":
            register.need(workspace_id)
        if register.condition(workspace_id) == "ready":
            raise _exists(workspace_id)
    except BaseException:
        holding.close()
        raise
    return holding


def _exists(workspace_id: str) -> Conflict:
    return Conflict(f"there is a workspace {workspace_id} already", hint="choose another id, or destroy that one first")


def born(workspace_id: str, template: str, below: State) -> Manifest:
    """Draw up the first manifest of a workspace."""
    return Manifest(
        id=workspace_id,
        birth=secrets.token_hex(8),
        template=template,
        upper=secrets.token_hex(8),
        below=below,
        created_at=datetime.now(UTC),
    )


Made = Sequence[tuple[Holding, Manifest]]


def make(
    grounds: Grounds, register: Register, holding: Holding, manifest: Manifest, *, copy_of: list[str] | None = None
) -> None:
    """Make a workspace in a folder that was taken for it; what cannot be finished leaves nothing behind.

    `copy_of` are layers to copy into it.
    """
    try:
        furnish(grounds, holding, manifest, copy_of=copy_of)
        finish(grounds, [(holding, manifest)])
    except BaseException:
        unmake(grounds, register, [(holding, manifest)])
        raise


def finish(grounds: Grounds, made: Made) -> None:
    """Mark workspaces that have everything they need."""
    grounds.trees.settle()
    for holding, manifest in made:
        manifests.mark(holding.folder)
        grounds.on_phase("mark")
        vouch(grounds, manifest)


def furnish(
    grounds: Grounds, holding: Holding, manifest: Manifest, *, copy_of: list[str] | None = None, bare: bool = False
) -> None:
    """Give a workspace all but its mark.

    `bare` leaves out the folders that every workspace has, for one whose layers have them.
    """

    def fill(target: Path, owner: Owner | None) -> Note | None:
        if copy_of:
            Copying(target, owner).run(copy_of, over=())
        if bare:
            resemble(target, grounds.layers(manifest.below, manifest.template))
        else:
            lay_out(target, owner)
        if copy_of:
            flush(target)
        return None

    _drop_half_made(grounds, holding.folder)
    manifests.write(holding.folder, manifest, first=True)
    grounds.on_phase("manifest")
    grounds.trees.new(manifest.upper, birth=manifest.birth, fill=fill, lasting=False)
    keep_copy(grounds, manifest)
    grounds.on_phase("tree")


def unmake(grounds: Grounds, register: Register, made: Made) -> None:
    """Take back workspaces that were not finished, as far as the disk lets us; a sweep takes the rest."""
    for holding, manifest in made:
        with suppress(OSError):
            (holding.folder / MARK).unlink(missing_ok=True)
            grounds.trees.drop([manifest.upper])
        with suppress(OSError, Unavailable, WorkspaceDamaged):
            register.remove(holding)
    grounds.trees.clear()


def _drop_half_made(grounds: Grounds, folder: Path) -> None:
    with suppress(WorkspaceDamaged):  # there was no manifest, and so no tree
        grounds.trees.drop([manifests.read(folder).upper])
    manifests.clear_drafts(folder)


def adopt(grounds: Grounds, register: Register, manifest: Manifest) -> Manifest:
    """Take in a plain folder: its content becomes the tree of a workspace, in one step. Only for who is alone.

    Returns the manifest as it was written: a folder that has an environment of its own gets none from a snapshot.
    """
    plain = register.path(manifest.id)
    if any(os.path.lexists(plain / name) for name in _ENVIRONMENTS):
        manifest = manifest.model_copy(update={"below": State()})
    with explained(str(plain)):
        fd, owner = claim(str(plain), adopt=True)
        os.close(fd)
        lay_out(plain, owner)
        grounds.trees.new(
            manifest.upper, birth=NOBODY, owner=_self(), fill=lambda target, _: _write_in(target, manifest)
        )
        grounds.on_phase("tree")
        _exchange(plain, grounds.trees.tree(manifest.upper))
        grounds.on_phase("exchanged")
        manifests.sync(register.folder)
    grounds.trees.annotate(manifest.upper, Note(manifest.birth))
    keep_copy(grounds, manifest)
    vouch(grounds, manifest)
    return manifest


def _self() -> Owner | None:
    return (0, os.getegid()) if os.geteuid() == 0 else None


def _write_in(folder: Path, manifest: Manifest) -> None:
    manifests.write(folder, manifest, first=True)
    manifests.mark(folder)


def _exchange(one: Path, other: Path) -> None:
    if _libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(one))
