"""Archives of workspaces in one store, under one key.

    chunks/<2>/<id>              content, once each
    archives/<name>/<version>    an index for every save of a workspace
    snapshots/<hash>             an index for every snapshot that some workspace stands on
    turns/…                      who saves or collects now

What whoever keeps the store can see: names of workspaces, when they were saved, and how much. Not what is in them; but
they can remove objects, so that an older version is the newest one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from skep.errors import ArchiveDamaged, NotFound
from skep.workspace.archive.catalogue import ARCHIVES, SNAPSHOTS, Catalogue, Version, archive_address, snapshot_address
from skep.workspace.archive.chunks import PREFIX, Chunks
from skep.workspace.archive.cipher import Cipher
from skep.workspace.archive.conveyor import Conveyor
from skep.workspace.archive.index import Index, SnapshotName, Tree
from skep.workspace.archive.key import Key
from skep.workspace.archive.objects import Store
from skep.workspace.archive.remembered import Remembered
from skep.workspace.archive.restore import Restoring
from skep.workspace.archive.save import Saving
from skep.workspace.archive.turns import STALE_S, Turn, collecting, saving
from skep.workspace.archive.watch import Progress, Watch, in_thread

Tell = Callable[[Progress], None]


class SnapshotTree(Protocol):
    """What an archive needs to know of a snapshot."""

    @property
    def template(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def hash(self) -> str: ...
    @property
    def tree(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class Saved:
    """An archive that was made; `stored_bytes` is what the store did not have yet."""

    name: str
    version: str
    files: int
    size_bytes: int
    stored_bytes: int
    #: Devices and the like, which nobody can make anew.
    left_out: int


@dataclass(frozen=True, slots=True)
class Restored:
    """A workspace that came back; its snapshot is restored by `restore_snapshot`, if this machine lacks it."""

    name: str
    version: str
    saved_at: datetime
    files: int
    size_bytes: int
    snapshot: SnapshotName | None
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Collected:
    """Chunks that no archive needed."""

    chunks: int
    size_bytes: int


class Archive:
    """Saves workspaces to a store and gets them back. Blocking work is done in threads and can be cancelled."""

    def __init__(self, store: Store, key: bytes, *, memory: Path | None = None) -> None:
        """`memory` is a folder of this machine for what is known of files from the last save of each workspace."""
        self._store = store
        self._cipher = Cipher(Key.of(key))
        self._catalogue = Catalogue(store, self._cipher)
        self._memory = memory

    async def save(
        self,
        name: str,
        layers: Sequence[str],
        *,
        snapshot: SnapshotTree | None = None,
        meta: Mapping[str, Any] | None = None,
        on_progress: Tell | None = None,
    ) -> Saved:
        """Save what a workspace's own layers show over its snapshot, and the snapshot if the store lacks it.

        The archive is there when this returns, and not at all if it raises; chunks that were stored by then are not
        stored again by the next save. Nobody may write to the layers meanwhile.
        """
        return await in_thread(lambda watch: self._save(watch, name, layers, snapshot, dict(meta or {})), on_progress)

    async def restore(
        self,
        name: str,
        into: Path,
        *,
        version: str | None = None,
        owner: tuple[int, int] | None = None,
        on_progress: Tell | None = None,
    ) -> Restored:
        """Write an archive, the newest if none is named, as one layer: a new folder that appears when it is whole."""
        index = await self.show(name, version=version)
        await in_thread(lambda watch: self._restore(watch, index.tree, into, owner), on_progress)
        tree = index.tree
        return Restored(name, index.version, index.saved_at, tree.files, tree.size_bytes, index.snapshot, index.meta)

    async def restore_snapshot(
        self,
        hash: str,
        into: Path,
        *,
        owner: tuple[int, int] | None = None,
        on_progress: Tell | None = None,
    ) -> tuple[SnapshotName, str | None]:
        """Write a snapshot's tree as a new folder; return its name and the text of the record that lay beside it."""
        index = await in_thread(lambda _: self._catalogue.read(snapshot_address(hash)))
        if index.snapshot is None:
            raise ArchiveDamaged(f"{snapshot_address(hash)} is not of a snapshot", hint="build the template anew")
        await in_thread(lambda watch: self._restore(watch, index.tree, into, owner), on_progress)
        return index.snapshot, index.meta.get("record")

    async def list(self, name: str | None = None) -> list[Version]:
        """List the archives of one workspace or of all, by name and the oldest first."""
        return await in_thread(lambda _: self._catalogue.versions(name))

    async def show(self, name: str, *, version: str | None = None) -> Index:
        """Return what an archive says about itself, the newest if none is named; NotFound if there is none."""
        return await in_thread(
            lambda _: self._catalogue.read(archive_address(name, version or self._catalogue.newest(name)))
        )

    async def delete(self, name: str, *, version: str | None = None) -> Sequence[str]:
        """Remove one archive of a workspace, or all; their chunks go when they are collected."""
        return await in_thread(lambda _: self._delete(name, version))

    async def collect(self, *, on_progress: Tell | None = None) -> Collected:
        """Remove the chunks that no archive needs; Conflict while one is being saved."""
        return await in_thread(self._collect, on_progress)

    def _save(
        self, watch: Watch, name: str, layers: Sequence[str], snapshot: SnapshotTree | None, meta: dict[str, Any]
    ) -> Saved:
        version = self._catalogue.following(name)
        with saving(self._store, watch.check) as turn:
            chunks = Chunks(self._store, self._cipher)
            chunks.survey()
            if snapshot is not None:
                self._save_snapshot(watch, turn, chunks, snapshot)
            remembered = Remembered(self._memory_of(name))
            work = Saving(chunks, self._conveyor(chunks, watch, turn), remembered, watch)
            tree = work.tree(layers, over=[str(snapshot.tree)] if snapshot is not None else [])
            self._write(watch, turn, archive_address(name, version), name, version, tree, snapshot, meta)
        remembered.keep()
        return Saved(name, version, tree.files, tree.size_bytes, watch.progress.moved_bytes, tree.left_out)

    def _save_snapshot(self, watch: Watch, turn: Turn, chunks: Chunks, snapshot: SnapshotTree) -> None:
        address = snapshot_address(snapshot.hash)
        if self._has_all(address, chunks):
            return
        work = Saving(chunks, self._conveyor(chunks, watch, turn), Remembered(None), watch)
        tree = work.tree([str(snapshot.tree)], over=[])
        record = snapshot.tree.parent / "snapshot.json"
        meta = {"record": record.read_text()} if record.is_file() else {}
        self._write(watch, turn, address, snapshot.template, snapshot.version, tree, snapshot, meta)

    def _has_all(self, address: str, chunks: Chunks) -> bool:
        """Tell whether the store has an index and all that it needs."""
        try:
            tree = self._catalogue.read(address).tree
        except NotFound:
            return False
        return all(map(chunks.has, [*tree.rows, *tree.chunks]))

    def _conveyor(self, chunks: Chunks, watch: Watch, turn: Turn) -> Conveyor:
        return Conveyor(chunks, watch, renew=turn.renew, lanes=self._store.lanes)

    def _write(
        self,
        watch: Watch,
        turn: Turn,
        address: str,
        name: str,
        version: str,
        tree: Tree,
        snapshot: SnapshotTree | None,
        meta: dict[str, Any],
    ) -> None:
        below = snapshot and SnapshotName(template=snapshot.template, version=snapshot.version, hash=snapshot.hash)
        index = Index(name=name, version=version, saved_at=datetime.now(UTC), tree=tree, snapshot=below, meta=meta)
        turn.confirm()
        watch.check()
        self._catalogue.write(address, index)

    def _restore(self, watch: Watch, tree: Tree, into: Path, owner: tuple[int, int] | None) -> None:
        chunks = Chunks(self._store, self._cipher)
        Restoring(chunks, tree, watch, lanes=self._store.lanes).into(into, owner=owner)

    def _delete(self, name: str, version: str | None) -> Sequence[str]:
        versions = [version] if version else [found.version for found in self._catalogue.versions(name)]
        for each in versions:
            self._catalogue.remove(archive_address(name, each))
        return versions

    def _collect(self, watch: Watch) -> Collected:
        with collecting(self._store) as turn:
            needed = self._needed()
            count = size = 0
            for stored in list(self._store.list(PREFIX)):
                if stored.name.rpartition("/")[2] not in needed:
                    watch.check()
                    turn.renew()
                    self._store.remove(stored.name)
                    count, size = count + 1, size + stored.size
                    watch.count(moved_bytes=stored.size)
            self._store.tidy(STALE_S)
            return Collected(count, size)

    def _needed(self) -> set[str]:
        """Return the chunks that archives need, having removed the snapshots that none stands on."""
        needed: set[str] = set()
        used = set()
        for _, index in self._catalogue.all(ARCHIVES):
            needed.update(index.tree.chunks, index.tree.rows)
            if index.snapshot is not None:
                used.add(snapshot_address(index.snapshot.hash))
        for address, index in list(self._catalogue.all(SNAPSHOTS)):
            if address in used:
                needed.update(index.tree.chunks, index.tree.rows)
            else:
                self._catalogue.remove(address)
        return needed

    def _memory_of(self, name: str) -> Path | None:
        if self._memory is None:
            return None
        place = f"{self._store.url}\0{self._cipher.key.id.hex()}\0{name}"
        return self._memory / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.memory"
