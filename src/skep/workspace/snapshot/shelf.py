"""The versions of one template: which there are, which is the latest, and what is left of builds that were cut off.

    snapshots/<template>/<version>/   tree, snapshot.json, build.log, lock
    snapshots/<template>/latest       a link to one of them, replaced in one step
    snapshots/<template>/failed.log   what the last build printed that failed

A version appears in one step, by getting its name, and goes in one step, by losing it. Whoever builds holds the lock
`building`, so what else lies there while nobody holds it was left by a build that was killed.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from skep.errors import NotFound, WorkspaceDamaged
from skep.sandbox.erase import erase
from skep.workspace.faults import explained
from skep.workspace.manifest import DRAFT, sync
from skep.workspace.snapshot.snapshot import Snapshot, number, read
from skep.workspace.snapshot.turn import chance, moment, turn

_TRASH = ".old-"


class Shelf:
    """The folder of one template's versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.template = folder.name

    @property
    def failed_log(self) -> Path:
        return self.folder / "failed.log"

    def get(self, version: str) -> Snapshot:
        if not number(version) or not (self.folder / version).is_dir():
            there = ", ".join(self._names()[-5:]) or f"none yet; make one: skep template build {self.template}"
            raise NotFound(
                f"there is no version {version[:60]!a} of the template {self.template}", hint=f"there are: {there}"
            )
        return read(self.folder / version)

    def built(self) -> bool:
        return (self.folder / "latest").is_symlink()

    def latest(self) -> Snapshot:
        try:
            version = str((self.folder / "latest").readlink())
        except FileNotFoundError as error:
            raise NotFound(
                f"the template {self.template} has not been built", hint=f"skep template build {self.template}"
            ) from error
        except OSError as error:
            raise WorkspaceDamaged(
                f"{self.folder / 'latest'} is not a link: {error.strerror}", hint=f"remove it, then: {self._rebuild()}"
            ) from error
        try:
            return self.get(version)
        except NotFound as error:
            raise WorkspaceDamaged(
                f"the latest version of {self.template}, {version[:60]!a}, is missing", hint=self._rebuild()
            ) from error

    def versions(self) -> list[Snapshot]:
        """List the versions that can be used, the oldest first."""
        found = []
        for name in self._names():
            with suppress(NotFound, WorkspaceDamaged):
                found.append(read(self.folder / name))
        return found

    def with_hash(self, content: str) -> Snapshot | None:
        return next((one for one in reversed(self.versions()) if one.hash == content), None)

    def next_version(self, content: str) -> str:
        highest = max(map(number, self._names()), default=0)
        return f"v{highest + 1:04d}-{content[:12]}"

    def publish(self, draft: Path, version: str) -> Snapshot:
        """Give a finished draft its name; `latest` is not moved yet."""
        with explained(str(self.folder)), moment(self.folder / "lock"):
            sync(draft)
            draft.rename(self.folder / version)
            sync(self.folder)
        return self.get(version)

    def point(self, version: str) -> Snapshot:
        """Make a version the latest, in one step."""
        with explained(str(self.folder)), moment(self.folder / "lock"):
            found = self.get(version)
            link = self.folder / f"{DRAFT}{secrets.token_hex(8)}"
            link.symlink_to(version)
            link.rename(self.folder / "latest")
            sync(self.folder)
        return found

    def collect(self, in_use: set[str]) -> list[Snapshot]:
        """Remove versions that are neither the latest nor in use; whoever has pinned one is using it."""
        removed = []
        with explained(str(self.folder)), moment(self.folder / "lock"):
            kept = {*in_use, self._latest_name()}
            for snapshot in self.versions():
                if snapshot.version not in kept and self._unused(snapshot):
                    removed.append(snapshot)
        with chance(self.folder / "building") as alone:
            if alone:
                self.sweep()
            else:
                self._erase(_TRASH)
        return removed

    def new_draft(self) -> Path:
        draft = self.folder / f"{DRAFT}{secrets.token_hex(8)}"
        with explained(str(draft)):
            draft.mkdir(mode=0o755)
        return draft

    def discard(self, draft: Path) -> None:
        with explained(str(draft)), suppress(FileNotFoundError):
            erase(str(draft), draft.stat().st_ino)

    def sweep(self) -> None:
        """Remove what killed builds and collections have left. Only for whoever holds `building`."""
        self._erase(DRAFT)
        self._erase(_TRASH)

    @asynccontextmanager
    async def building(self, tell: Callable[[str], None]) -> AsyncIterator[None]:
        """Wait until nobody else builds this template, and keep others from it."""
        with explained(str(self.folder)):
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        waits = partial(tell, "waiting for another process that builds it")
        async with turn(self.folder / "building", alone=True, on_wait=waits):
            yield

    def _unused(self, snapshot: Snapshot) -> bool:
        """Take a version's name away, unless somebody has pinned it."""
        with chance(snapshot.folder / "lock") as unused:
            if unused:
                snapshot.folder.rename(self.folder / f"{_TRASH}{secrets.token_hex(8)}")
            return unused

    def _erase(self, prefix: str) -> None:
        with explained(str(self.folder)):
            for path in self.folder.glob(f"{prefix}*"):
                if path.is_dir() and not path.is_symlink():
                    erase(str(path), path.stat().st_ino)
                else:
                    path.unlink(missing_ok=True)

    def _names(self) -> list[str]:
        try:
            names = [path.name for path in self.folder.iterdir() if number(path.name)]
        except FileNotFoundError:
            return []
        return sorted(names, key=lambda name: (number(name), name))

    def _latest_name(self) -> str:
        try:
            return str((self.folder / "latest").readlink())
        except OSError:
            return ""

    def _rebuild(self) -> str:
        return f"skep template build {self.template}"
