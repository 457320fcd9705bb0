"""Go on with what a worker left behind when it died."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select, update

from skep.sessions.controller import Identity, owner
from skep.state.leases import Leases, clock
from skep.state.schema import leases, tasks
from skep.tasks.engine import Engine
from skep.tasks.ledger import Ledger
from skep.tasks.task import OPEN

#: How long the relief of one worker may take before another process tries.
_TTL_S = 30.0


class Relief:
    """Finds workers whose lease is over, or whose process is seen to be gone, and puts their tasks in line again."""

    def __init__(self, ledger: Ledger, held: Leases, engine: Engine, here: Identity) -> None:
        self._ledger = ledger
        self._leases = held
        self._engine = engine
        self._here = here

    async def sweep(self) -> int:
        """Put in line what nobody works on any more; return how much that was."""
        found = await self._engine.abandoned({self._engine.executor})
        gone = await self._gone({one.executor for one in found})
        return sum([await self._relieve(executor) for executor in sorted(gone)])

    async def _relieve(self, executor: str) -> int:
        # Under a lease: of two that relieve one worker, the second could otherwise take back what the first has begun.
        lease = await self._leases.acquire(f"relief:{executor}"[:128], holder=self._engine.executor, ttl_s=_TTL_S)
        if lease is None:
            return 0
        left = [one for one in await self._engine.abandoned({self._engine.executor}) if one.executor == executor]
        for work in left:
            await self._engine.resume(work)
        await self._leases.retire(lease)
        return len(left)

    async def _gone(self, executors: Collection[str]) -> set[str]:
        now = clock(self._ledger.database.dialect)
        kept = (leases.c.name.in_(executors), leases.c.holder.is_not(None), leases.c.expires_at > now)
        async with self._ledger.database.read() as connection:
            alive = (
                set((await connection.execute(select(leases.c.name).where(*kept))).scalars()) if executors else set()
            )
        return {one for one in executors if one not in alive or self._is_dead(one)}

    def _is_dead(self, executor: str) -> bool:
        process = owner(executor)
        return process is not None and process.is_dead(self._here)

    async def take_in(self) -> int:
        """Have tasks dispatched anew that the engine does not know of: its tables were lost, or are not the same."""
        enqueued = (tasks.c.status.in_(OPEN), tasks.c.enqueued.is_(True))
        ids = [task.id for task in await self._ledger.select(select(tasks).where(*enqueued))]
        unknown = [one for one in ids if one not in await self._engine.known(ids)] if ids else []
        if unknown:
            lost = update(tasks).where(tasks.c.id.in_(unknown), tasks.c.status.in_(OPEN))
            async with self._ledger.database.write() as connection:
                await connection.execute(lost.values(enqueued=False, status="queued"))
        return len(unknown)
