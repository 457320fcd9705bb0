"""The built environments of this machine: made from templates, kept by version, removed when nobody needs them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from skep.errors import SkepError
from skep.sandbox.census import Census, Usage
from skep.sandbox.limits import Limits
from skep.state.names import check_name
from skep.workspace.faults import explained, in_thread
from skep.workspace.layers.copying import flush
from skep.workspace.snapshot.build import LIMITS, Build, Plan, plan
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.installer import Journal
from skep.workspace.snapshot.package_cache import PackageCache
from skep.workspace.snapshot.shelf import Shelf
from skep.workspace.snapshot.snapshot import LOG, Record, Snapshot, write
from skep.workspace.snapshot.turn import shared
from skep.workspace.template.template import Template
from skep.workspace.template.templates import Templates

Tell = Callable[[str], None]


def _quiet(_: str) -> None:
    """Tell nobody."""


class Snapshots:
    """All snapshots below one home."""

    def __init__(
        self, home: Path, templates: Templates, *, indexes: Indexes | None = None, limits: Limits | None = None
    ) -> None:
        self.folder = home / "snapshots"
        self.templates = templates
        self.indexes = indexes or Indexes()
        self.limits = limits or LIMITS
        self.cache = PackageCache(home / "packages")

    async def build(self, name: str, *, on_progress: Tell = _quiet, fresh: bool = False) -> Snapshot:
        """Build a template, and make that version the latest.

        If what it asks for is what an earlier version holds, that one is taken, unless it is to be `fresh`. A build
        that fails changes nothing; what it printed is kept.
        """
        template = self.templates.show(name)
        shelf = Shelf(self.folder / template.name)
        async with shelf.building(on_progress):
            shelf.sweep()
            draft = shelf.new_draft()
            try:
                journal = Journal(on_progress, draft / LOG)
                return await self._build(template, shelf, draft, journal, fresh=fresh)
            except SkepError as error:
                _keep_log(shelf, draft, error)
                raise
            finally:
                await in_thread(shelf.discard, draft)

    async def ready(self, name: str, on_progress: Tell = _quiet) -> Snapshot:
        """Return the latest version, built now if there is none."""
        shelf = self._shelf(name)
        return shelf.latest() if shelf.built() else await self.build(name, on_progress=on_progress)

    def latest(self, name: str) -> Snapshot:
        return self._shelf(name).latest()

    def get(self, name: str, version: str) -> Snapshot:
        return self._shelf(name).get(version)

    def versions(self, name: str) -> list[Snapshot]:
        """List the versions of a template, the oldest first."""
        return self._shelf(name).versions()

    def rollback(self, name: str, version: str) -> Snapshot:
        """Make an earlier version, or any other, the latest. Workspaces keep the one they have."""
        shelf = self._shelf(name)
        shelf.get(version)
        return shelf.point(version)

    def collect(self, in_use: set[tuple[str, str]]) -> list[Snapshot]:
        """Remove versions that are neither the latest of their template nor in use, and what killed builds left.

        In use are those named, as template and version, and those that somebody has pinned.
        """
        removed: list[Snapshot] = []
        for folder in sorted(self.folder.iterdir()) if self.folder.is_dir() else []:
            used = {version for template, version in in_use if template == folder.name}
            removed += Shelf(folder).collect(used)
        return removed

    def _shelf(self, name: str) -> Shelf:
        return Shelf(self.folder / check_name("template", name))

    async def _build(self, template: Template, shelf: Shelf, draft: Path, journal: Journal, *, fresh: bool) -> Snapshot:
        def needed(decided: Plan) -> bool:
            return fresh or shelf.with_hash(decided.hash) is None

        decided = await plan(template, self.cache, self.indexes, journal, needed=needed)
        if not fresh and (found := shelf.with_hash(decided.hash)):
            journal.tell(f"{found.version} holds exactly this")
            with found.pinned():
                return shelf.point(found.version)
        build = Build(decided, draft / "tree", self.cache, self.indexes, journal, self.limits)
        await build.run()
        journal.tell("writing it to the disk")
        version = shelf.next_version(decided.hash)
        await in_thread(_seal, draft, version, decided)
        with shared(draft / "lock"):  # it moves along; until it is the latest, a collection could take it for unused
            journal.tell(f"naming it {version}")
            shelf.publish(draft, version)
            journal.tell(f"making {version} the latest")
            return shelf.point(version)


def _seal(draft: Path, version: str, decided: Plan) -> None:
    """Measure a finished tree, write down what it is, and wait until all of it is on the disk."""
    usage = _measured(draft / "tree")
    record = Record(
        template=decided.template.name,
        version=version,
        hash=decided.hash,
        recipe=decided.template.recipe_hash(),
        python=decided.python,
        python_packages=decided.chosen.python_packages,
        node=decided.node,
        node_packages=decided.chosen.node_packages,
        built_at=datetime.now(UTC),
        size_bytes=usage.size,
        files=usage.inodes,
        environment=decided.environment,
    )
    write(draft, record)
    with explained(str(draft)):
        flush(draft)


def _measured(tree: Path) -> Usage:
    with explained(str(tree)):
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return Census.take(fd)
        finally:
            os.close(fd)


def _keep_log(shelf: Shelf, draft: Path, error: SkepError) -> None:
    """Keep what a failed build printed, and say where, unless it printed nothing."""
    log = draft / LOG
    with explained(str(log)):
        if log.exists() and log.stat().st_size:
            log.rename(shelf.failed_log)
            error.hint = f"{error.hint}; the whole log: {shelf.failed_log}" if error.hint else f"see {shelf.failed_log}"
