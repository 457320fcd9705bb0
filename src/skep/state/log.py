"""The event log: append-only, one gap-free sequence per hive, chained by hashes, to read and to follow."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from datetime import UTC, datetime

from sqlalchemy import Select, select

from skep.errors import InvalidRequest
from skep.state.checkpoint import Signer
from skep.state.database import Database
from skep.state.events import EVENT_TYPES, Event, Recorded
from skep.state.follow import Watch
from skep.state.notary import Notary
from skep.state.record import check_id, draft, read_record, write_time
from skep.state.schema import events
from skep.state.writer import Alongside, Writer

PAGE = 500
MAX_PAGE = 10_000
MAX_APPEND = 10_000
MAX_APPEND_BYTES = 32 * 1024 * 1024
CHECKPOINT_EVERY = 1000


def _now() -> datetime:
    return datetime.now(UTC)


class EventLog:
    """The log of every hive in a database, for one event loop.

    Several processes may append to one hive: the database orders them, and an event is visible only once all
    before it are. Close the log before the database.
    """

    def __init__(
        self,
        database: Database,
        *,
        signer: Signer | None = None,
        checkpoint_every: int = CHECKPOINT_EVERY,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self._database = database
        self._watch = Watch(database)
        notary = Notary(database, signer, every=checkpoint_every, now=now) if signer is not None else None
        self._writer = Writer(database, notary=notary, committed=self._watch.appended, now=now)

    async def append(
        self,
        event: Event,
        *,
        hive_id: str,
        account_id: str,
        actor: str,
        task_id: str | None = None,
        alongside: Alongside | None = None,
    ) -> Recorded:
        """Append one event; it is durable when this returns.

        Raise InvalidRequest for what the log cannot keep: a body over 1 MiB, text that is not Unicode, NaN,
        integers beyond 2**53. After Unavailable or a cancellation the event may have been recorded or not.

        `alongside` does other work in the same transaction: it takes effect with the event, or neither does.
        """
        one = draft(event, hive_id=hive_id, account_id=account_id, actor=actor, task_id=task_id)
        return (await self._writer.submit([one], alongside))[0]

    async def append_all(
        self,
        events: Sequence[Event],
        *,
        hive_id: str,
        account_id: str,
        actor: str,
        task_id: str | None = None,
        alongside: Alongside | None = None,
    ) -> list[Recorded]:
        """Append events one behind the other in one transaction: all of them are recorded, or none.

        `alongside` does other work in that transaction, as with `append`.
        """
        if len(events) > MAX_APPEND:
            raise InvalidRequest(
                f"{len(events):,} events in one call; at most {MAX_APPEND:,} go together",
                hint="append in parts",
            )
        filed = {"hive_id": hive_id, "account_id": account_id, "actor": actor}
        drafts = [draft(event, task_id=task_id, **filed) for event in events]
        size = sum(each.size_bytes for each in drafts)
        if size > MAX_APPEND_BYTES:
            raise InvalidRequest(
                f"{size:,} bytes in one call; at most {MAX_APPEND_BYTES:,} go together", hint="append in parts"
            )
        return await self._writer.submit(drafts, alongside) if drafts else []

    async def page(
        self,
        hive_id: str,
        *,
        after: int = 0,
        limit: int = PAGE,
        types: Collection[str] = (),
        task_id: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> list[Recorded]:
        """Return up to `limit` events after that number, in order; `since` is included, `until` is not."""
        statement = _matching(hive_id, types=types, task_id=task_id, since=since, until=until)
        statement = statement.where(events.c.seq > _within("after", after, 0, 2**63 - 1))
        statement = statement.limit(_within("limit", limit, 1, MAX_PAGE))
        async with self._database.read() as connection:
            rows = (await connection.execute(statement)).all()
        return [read_record(row.record, row.hash) for row in rows]

    async def follow(
        self, hive_id: str, *, after: int = 0, types: Collection[str] = (), task_id: str | None = None
    ) -> AsyncGenerator[Recorded]:
        """Yield what was recorded after that sequence number, then what comes, each once and in order.

        History is read a page from the cursor on; so is what comes, unless this process appended all of it and has it
        at hand. The cursor is the same, so there is no switch at which to lose or repeat an event. Ends when the log is
        closed.
        """
        wanted = frozenset(_known(types))
        cursor, live = after, True
        with self._watch.following(hive_id):
            while live:
                reach = self._watch.reach(hive_id)
                fresh = self._watch.at_hand(hive_id, cursor)
                found = (
                    await self.page(hive_id, after=cursor, types=wanted, task_id=task_id) if fresh is None else fresh
                )
                for recorded in found:
                    cursor = recorded.seq
                    if fresh is None or _matches(recorded, wanted, task_id):
                        yield recorded
                if fresh is not None or not found:
                    cursor = max(cursor, reach)
                    live = await self._watch.beyond(hive_id, cursor)

    async def close(self) -> None:
        """Write what is queued, sign the ends of the logs that grew, and end those who follow."""
        try:
            await self._writer.close()
        finally:
            await self._watch.close()


def _matching(
    hive_id: str,
    *,
    types: Collection[str],
    task_id: str | None,
    since: datetime | None,
    until: datetime | None,
) -> Select[tuple[str, bytes]]:
    statement = select(events.c.record, events.c.hash).where(events.c.hive_id == check_id("hive_id", hive_id))
    if types:
        statement = statement.where(events.c.type.in_(_known(types)))
    if task_id is not None:
        statement = statement.where(events.c.task_id == check_id("task_id", task_id))
    if since is not None:
        statement = statement.where(events.c.at >= write_time(since))
    if until is not None:
        statement = statement.where(events.c.at < write_time(until))
    return statement.order_by(events.c.seq)


def _matches(recorded: Recorded, types: Collection[str], task_id: str | None) -> bool:
    return (not types or recorded.event.type in types) and (task_id is None or recorded.task_id == task_id)


def _known(types: Collection[str]) -> list[str]:
    unknown = sorted(set(types) - EVENT_TYPES)
    if unknown:
        raise InvalidRequest(
            f"there is no event type {ascii(unknown[0])[:60]}",
            hint=f"use one of {', '.join(sorted(EVENT_TYPES))}",
        )
    return sorted(types)


def _within(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise InvalidRequest(f"{name} is {value}", hint=f"use {least} to {most}")
    return value
