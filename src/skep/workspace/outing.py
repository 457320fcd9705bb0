"""A workspace on a machine elsewhere: its files are carried there, and home before the machine is given up.

The manifest says where the files are before anything runs there, and its next write, which names the tree that they
have come home as, says that they are here again. So a crash at any moment leaves one place that has the newest files,
and it is known which. While they are elsewhere, what is here is older, and is never used as if it were not.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from skep.errors import SandboxLost, SkepError, Unavailable, WorkspaceDamaged
from skep.sandbox import elsewhere
from skep.sandbox.census import Usage
from skep.sandbox.recipe import Recipe
from skep.sandbox.stack import Mount
from skep.sandbox.stream import StreamSandbox
from skep.workspace.copies import copy_in
from skep.workspace.faults import explained, in_thread
from skep.workspace.grounds import Grounds
from skep.workspace.luggage import Feed, Sent, Unpacking, send
from skep.workspace.manifest import Manifest, Out

#: The label by which a machine is found whose id nobody has written down.
_MARK = "outing"
_log = logging.getLogger("skep.workspace.outing")


class Traveller(Protocol):
    """A workspace in this process's hands, as far as its files may leave home."""

    grounds: Grounds
    manifest: Manifest

    async def save(self, manifest: Manifest) -> None: ...


class Outing:
    """The files of one workspace, on a machine elsewhere for as long as this process has a sandbox there."""

    def __init__(self, held: Traveller, sandbox: StreamSandbox, contents: Mapping[bytes, bytes] | None = None) -> None:
        self._held = held
        self._contents = contents or {}
        self.sandbox = sandbox

    async def come_home(self) -> None:
        """Have the files here as they are there now; what runs there is halted meanwhile, and goes on."""
        async with self.sandbox.still():
            await self._fetch("out")

    async def end(self) -> None:
        """End what runs there, bring the files home, and give the machine up; not before they are on the disk."""
        async with self.sandbox.still():
            await self._fetch("back")
            await self.sandbox.kill_all()  # or what was halted would go on for a moment, to no end
        await self._part()

    async def leave(self) -> None:
        """Let go of the machine, which keeps the files until somebody comes back for them."""
        with suppress(SkepError):  # it comes to rest by itself
            await self.sandbox.stop()

    async def _part(self) -> None:
        try:
            await self.sandbox.discard()
        except SkepError as error:  # the next start sees to it
            _log.warning("machine %s of %s was not ended: %s", self.sandbox.id, self.sandbox.mechanism, error.message)
            return
        await self._held.save(self._held.manifest.changed(out=None))

    async def _fetch(self, stage: Literal["out", "back"]) -> None:
        held, manifest = self._held, self._held.manifest
        grounds = held.grounds
        limits = await in_thread(grounds.limits_for, manifest)
        room = Usage(_and_some(limits.disk_bytes), _and_some(limits.inodes))
        async with grounds.referring(), aclosing(self.sandbox.files.pack(known=self._contents)) as pieces:
            base = grounds.trees.tree(manifest.upper)
            unpacking = Unpacking(Feed(pieces), room=room, base=base, contents=self._contents)
            self._contents = {}  # whoever has to try again gets everything
            upper = await in_thread(
                lambda: grounds.trees.new(
                    birth=manifest.birth, owner=grounds.trees.owner(manifest.upper), fill=unpacking.into
                )
            )
            grounds.on_phase("fetched")
            assert manifest.out is not None
            out = manifest.out.model_copy(update={"stage": stage, "copied_at": datetime.now(UTC)})
            await held.save(manifest.changed(upper=upper, layers=(), based=False, out=out))
        self._contents = unpacking.held
        grounds.on_phase("came home")


async def come_back(outing: Outing) -> None:
    """Bring the files home and give the machine up; if that cannot be now, the machine keeps them."""
    try:
        if await outing.sandbox.alive():
            await outing.end()
            return
    except SkepError as error:
        _log.warning("files stay on machine %s of %s: %s", outing.sandbox.id, outing.sandbox.mechanism, error.message)
    await outing.leave()


async def set_out(held: Traveller, recipe: Recipe, mounts: Sequence[Mount]) -> Outing:
    """Start a sandbox elsewhere with the files of a workspace: on the machine that has them, else on a new one."""
    out = held.manifest.out
    if out is not None and out.stage == "out":
        outing = await go_back(held, recipe, out)
        try:
            await copy_in(outing.sandbox, mounts)
        except BaseException:
            await outing.leave()
            raise
        return outing
    await clear(held, recipe.options)
    return await _begin(held, recipe, mounts)


async def go_back(held: Traveller, recipe: Recipe, out: Out) -> Outing:
    """Start a sandbox on the machine that has the files; no other one, and not with older files."""
    assert out.machine is not None
    try:
        sandbox = await elsewhere.rejoin(recipe, out.machine)
    except SkepError as error:
        raise _explained(held.manifest, out, error) from error
    if sandbox is None:
        raise _gone(held.manifest, out)
    return Outing(held, sandbox)


async def clear(held: Traveller, options: Mapping[str, Any]) -> None:
    """End a machine that is left of an outing that has not begun or is over: the newest files are here."""
    out = held.manifest.out
    if out is None:
        return
    mark = {_MARK: out.mark}
    try:
        await elsewhere.forget(out.mechanism, options, machine=out.machine, labels=mark)
    except SkepError as error:
        _log.warning("a machine of %s with the label %s was not ended: %s", out.mechanism, mark, error.message)
        return  # whoever comes next tries again
    await held.save(held.manifest.changed(out=None))


async def _begin(held: Traveller, recipe: Recipe, mounts: Sequence[Mount]) -> Outing:
    now = datetime.now(UTC)
    out = Out(mechanism=recipe.mechanism, mark=secrets.token_hex(8), copied_at=now)
    await held.save(held.manifest.changed(out=out))
    held.grounds.on_phase("going")
    try:
        sandbox = await elsewhere.make(_labelled(recipe, _labels(held.manifest, out)))
    except SkepError:
        await clear(held, recipe.options)
        raise
    try:
        contents = await _carry(held, sandbox)
        await copy_in(sandbox, mounts)
        held.grounds.on_phase("carried")
        await held.save(held.manifest.changed(out=out.model_copy(update={"stage": "out", "machine": sandbox.id})))
    except BaseException:
        with suppress(SkepError):
            await sandbox.discard()
            await held.save(held.manifest.changed(out=None))
        raise
    held.grounds.on_phase("out")
    return Outing(held, sandbox, contents)


async def _carry(held: Traveller, sandbox: StreamSandbox) -> Mapping[bytes, bytes]:
    sent = Sent({})
    tree = held.grounds.trees.tree(held.manifest.upper)
    with explained(str(tree)):
        async with aclosing(send(tree, sent)) as pieces:
            await sandbox.files.plant(pieces)
    return sent.contents


def _labels(manifest: Manifest, out: Out) -> dict[str, str]:
    return {**manifest.labels, "workspace": manifest.id, _MARK: out.mark}


def _labelled(recipe: Recipe, labels: Mapping[str, str]) -> Recipe:
    return replace(recipe, labels=labels)


def _and_some(limit: int) -> int:
    """Return a limit as it is held here: elsewhere it is looked at from time to time, and counted otherwise."""
    return limit + limit // 4


def _explained(manifest: Manifest, out: Out, error: SkepError) -> SkepError:
    """Say of a machine that cannot be used what it has."""
    kind = Unavailable if isinstance(error, SandboxLost) else type(error)
    return kind(
        f"{_where(manifest, out)} and it cannot be used now: {error.message}", hint=f"{error.hint}; {_accept(manifest)}"
    )


def _gone(manifest: Manifest, out: Out) -> WorkspaceDamaged:
    return WorkspaceDamaged(
        f"{_where(manifest, out)} and it is there no more. What is here is from {out.copied_at:%Y-%m-%d %H:%M:%S} UTC: "
        "everything since is lost",
        hint=_accept(manifest),
    )


def _where(manifest: Manifest, out: Out) -> str:
    return f"the newest files of workspace {manifest.id} are on machine {out.machine} of {out.mechanism},"


def _accept(manifest: Manifest) -> str:
    return f"to go on with the files that are here: skep workspace fetch {manifest.id} --abandon"
