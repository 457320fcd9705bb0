"""Files between a person and a session's computer, on record: attachments in, artifacts out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from skep.app.program import Program
from skep.errors import InvalidRequest, NotFound
from skep.sessions.artifacts import Artifact, Collected, Skipped, collect
from skep.sessions.attachments import Arrival, Arrived, Sent, receive
from skep.sessions.computer import Computer
from skep.sessions.filenames import shown
from skep.sessions.session import Session
from skep.sessions.shelf import Shelf
from skep.state.events import ArtifactsCollected, AttachmentsReceived

_LEAST_DIGITS = 4
#: How much of previews and names goes into one event; the log takes at most 1 MiB.
_EVENT_BYTES = 400 << 10


@dataclass(frozen=True, slots=True)
class Delivered:
    """An artifact as it is on record."""

    session: str
    at: datetime
    path: str
    name: str
    media_type: str
    size: int
    sha256: str
    preview: Any = None


class Delivery:
    """The files of one session's person."""

    def __init__(self, program: Program, session: Session, *, actor: str) -> None:
        self._program = program
        self._session = session
        self._actor = actor
        self.shelf = Shelf(program.paths.home / "artifacts")

    async def attach(self, computer: Computer, sent: Sequence[Sent]) -> Arrival:
        """Write files that somebody sends into the workspace, and put on record what arrived and what did not."""
        async with computer.files() as files:
            arrival = await receive(files, sent)
        refused = tuple({"name": shown(one.name), "reason": one.reason} for one in arrival.refused)
        await self._record(
            AttachmentsReceived(session=self._session.id, files=tuple(map(_plain, arrival.arrived)), refused=refused)
        )
        return arrival

    async def collect(self, computer: Computer) -> Collected:
        """Put what has changed in output/display on the shelf, and on record."""
        known = {one.path: one.sha256 for one in await self.delivered()}
        async with computer.files() as files:
            collected = await collect(files, known=known, shelf=self.shelf)
        await self._record(*self._collected(collected))
        return collected

    def _collected(self, collected: Collected) -> Iterator[ArtifactsCollected]:
        """Yield the records of what was collected, each small enough for the log."""
        session, room = self._session.id, _EVENT_BYTES
        files: list[dict[str, Any]] = []
        for one in map(_artifact, collected.artifacts):
            size = len(json.dumps(one, ensure_ascii=False).encode())
            if files and size > room:
                yield ArtifactsCollected(session=session, files=tuple(files))
                files, room = [], _EVENT_BYTES
            files.append(one)
            room -= size
        if files or collected.skipped:
            skipped = tuple(map(_plain, collected.skipped))
            yield ArtifactsCollected(session=session, files=tuple(files), skipped=skipped)

    async def delivered(self) -> list[Delivered]:
        """Return all artifacts of the session that are on record, the oldest first."""
        found, after = [], 0
        while page := await self._program.log.page(
            self._session.hive_id, after=after, types=(ArtifactsCollected.model_fields["type"].default,)
        ):
            after = page[-1].seq
            for recorded in page:
                event = recorded.event
                if isinstance(event, ArtifactsCollected) and event.session == self._session.id:
                    found += [Delivered(event.session, recorded.at, **_fields(one)) for one in event.files]
        return found

    async def find(self, reference: str) -> Delivered:
        """Find an artifact of the session, by its name or path the newest, or by the beginning of its hash."""
        for one in reversed(await self.delivered()):
            by_hash = len(reference) >= _LEAST_DIGITS and one.sha256.startswith(reference)
            if by_hash or reference in (one.name, one.path):
                return one
        raise NotFound(f"the session has no artifact {shown(reference)}", hint="list them with: skep artifacts list")

    async def _record(self, *events: AttachmentsReceived | ArtifactsCollected) -> None:
        session = self._session
        if events:
            await self._program.log.append_all(
                events, hive_id=session.hive_id, account_id=session.account_id, actor=self._actor
            )


def from_disk(path: Path) -> Sent:
    """Send a file of this machine."""
    if not path.is_file():
        raise InvalidRequest(f"{shown(str(path))} is no file", hint="give files; pack a folder first")
    return Sent(path.name, _pieces(path))


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    from skep.workspace.faults import in_thread

    try:
        with path.open("rb") as file:
            while piece := await in_thread(file.read, 1 << 20):
                yield piece
    except OSError as error:
        raise InvalidRequest(f"{shown(str(path))} cannot be read: {error.strerror}", hint="check the path") from error


def _plain(one: Arrived | Artifact | Skipped) -> dict[str, Any]:
    """Return something as a record has it, in which there are no tuples."""
    body: dict[str, Any] = json.loads(json.dumps(asdict(one)))
    return body


def _artifact(one: Artifact) -> dict[str, Any]:
    kind = type(one.preview).__name__.removesuffix("Preview").lower()
    body = _plain(one)
    return {**body, "preview": {"kind": kind, **body["preview"]} if one.preview else None}


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    """Take from a record what is known of an artifact; a newer Skep may have written more."""
    return {name: data.get(name) for name in ("path", "name", "media_type", "size", "sha256", "preview")}
