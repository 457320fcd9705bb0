"""For hives whose newest prompt undoes what the one before it did: keep the workspace as it was, and return to it."""

from __future__ import annotations

from functools import partial

from sqlalchemy import select

from skep.sessions.sessions import Sessions
from skep.state.events import Checkpointed, RolledBack
from skep.state.record import write_time
from skep.state.schema import tasks
from skep.tasks.ledger import Ledger
from skep.tasks.run import Run
from skep.tasks.task import Task
from skep.workspace.workspace import Workspace


class Rewind:
    """Keeps the state of a thread's workspace before a task, and brings it back."""

    def __init__(self, sessions: Sessions, ledger: Ledger) -> None:
        self._sessions = sessions
        self._ledger = ledger

    async def prepare(self, run: Run, before: str | None) -> None:
        """Return to the state `before` those tasks whose place this one took, and keep the one from which it begins."""
        if before is not None:
            left = await run.step("rewind", partial(self._return, run, before))
            if left is not None:
                run.note("rewound", RolledBack(checkpoint=before, left=left))
        kept = await run.step("keep", partial(self._keep, run))
        if kept is not None and run.own:
            note = f"before {run.task.id}"
            await run.journal.record(("kept", Checkpointed(checkpoint=kept, name=None, note=note)), checkpoint=kept)

    async def to_undo(self, task: Task) -> str | None:
        """Return the state before the first of the tasks that this one displaced."""
        same = (tasks.c.hive_id == task.hive_id, tasks.c.thread == task.thread, tasks.c.parent.is_(None))
        at = write_time(task.created_at)
        displaced = (tasks.c.status == "cancelled", tasks.c.created_at < at, tasks.c.ended_at >= at)
        statement = select(tasks.c.checkpoint).where(*same, *displaced, tasks.c.checkpoint.is_not(None))
        async with self._ledger.database.read() as connection:
            found: str | None = (
                await connection.execute(statement.order_by(tasks.c.created_at).limit(1))
            ).scalar_one_or_none()
        return found

    async def _keep(self, run: Run) -> str | None:
        workspace = await self._workspace(run)
        return None if workspace is None else (await workspace.checkpoint(note=f"before {run.task.id}")).id

    async def _return(self, run: Run, checkpoint: str) -> str | None:
        workspace = await self._workspace(run)
        return None if workspace is None else (await workspace.rollback(checkpoint)).id

    async def _workspace(self, run: Run) -> Workspace | None:
        """Return the workspace if this process has it: there is none to keep without a sandbox."""
        hive, thread = run.hive, run.task.thread
        computer = await self._sessions.resolve(hive, thread, account_id=run.task.account_id)
        live = self._sessions.live(self._sessions.wanted(hive, thread).id)
        if computer.down is not None or live is None or not isinstance(live.held, Workspace):
            return None
        return live.held
