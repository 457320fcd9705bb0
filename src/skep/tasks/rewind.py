"""For hives whose newest prompt undoes what the one before it did: keep the workspace as it was, and return to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sqlalchemy import or_, select

from skep.sessions.sessions import Sessions
from skep.state.events import Checkpointed, Noted, RolledBack
from skep.state.hives import Hive
from skep.state.record import write_time
from skep.state.schema import tasks
from skep.tasks.agreement import Agreement
from skep.tasks.ledger import Ledger
from skep.tasks.outline import step_key
from skep.tasks.run import Run
from skep.tasks.task import Task
from skep.workspace.manifest import Checkpoint
from skep.workspace.workspace import Workspace

#: How many prompts in a row that took each other's place are looked at.
_MOST = 100
_SHARED = "The prompt before was to be undone, and was not: other threads have worked in the same workspace since."


@dataclass(frozen=True, slots=True)
class Undo:
    """The state to return to, if any; `shared`: there is none because others would lose their work by it."""

    checkpoint: str | None = None
    shared: bool = False


class Checkpoints(Protocol):
    """Keeps states of workspaces, whichever process holds them; `Workspaces` is one."""

    async def checkpoint(self, workspace_id: str, *, note: str) -> Checkpoint: ...
    async def rollback(self, workspace_id: str, to: str) -> Checkpoint: ...


class Rewind:
    """Keeps the state of a thread's workspace before a task, and brings it back.

    Without `checkpoints` only a workspace that this process holds itself is kept.
    """

    def __init__(self, sessions: Sessions, checkpoints: Checkpoints | None = None) -> None:
        self._sessions = sessions
        self._checkpoints = checkpoints

    async def prepare(self, run: Run, agreement: Agreement) -> None:
        """Undo what those did whose place this one took, and keep the state of the workspace from which it begins."""
        if agreement.undoes is not None:
            left = await run.step("rewind", partial(self._return, run, agreement.undoes))
            if left is not None:
                run.note("rewound", RolledBack(checkpoint=agreement.undoes, left=left), numbered=True)
        elif agreement.shared:
            run.note_ahead("not rewound", Noted(text=_SHARED))
        kept = await run.step("keep", partial(self._keep, run))
        if kept is not None and run.own:
            event = Checkpointed(checkpoint=kept, name=None, note=f"before {run.task.id}")
            await run.journal.record((step_key(run.number, "kept"), event), checkpoint=kept)

    async def _keep(self, run: Run) -> str | None:
        note = f"before {run.task.id}"
        match await self._workspace(run):
            case Workspace() as held:
                return (await held.checkpoint(note=note)).id
            case str(name) if self._checkpoints is not None:
                return (await self._checkpoints.checkpoint(name, note=note)).id
            case _:
                return None

    async def _return(self, run: Run, checkpoint: str) -> str | None:
        match await self._workspace(run):
            case Workspace() as held:
                return (await held.rollback(checkpoint)).id
            case str(name) if self._checkpoints is not None:
                return (await self._checkpoints.rollback(name, checkpoint)).id
            case _:
                return None

    async def _workspace(self, run: Run) -> Workspace | str | None:
        """Return the workspace, or its id if another process has it: there is none to keep without a sandbox."""
        hive, thread = run.hive, run.task.thread
        computer = await self._sessions.resolve(hive, thread, account_id=run.task.account_id)
        session = self._sessions.wanted(hive, thread).id
        live = self._sessions.live(session)
        if computer.down is not None or live is None:
            return None
        return live.held if isinstance(live.held, Workspace) else session


async def find_undo(ledger: Ledger, task: Task, hive: Hive) -> Undo:
    """Find what a task has to undo: all that was done by those in a row that each ended for the next one's sake."""
    before, since = await _before_displaced(ledger, task)
    if before is None or hive.upkeep.threads == "thread":
        return Undo(before)
    other = (tasks.c.hive_id == task.hive_id, tasks.c.thread != task.thread, tasks.c.started_at.is_not(None))
    lately = or_(tasks.c.ended_at.is_(None), tasks.c.ended_at >= since)
    shared = bool(await ledger.select(select(tasks).where(*other, lately).limit(1)))
    return Undo(None if shared else before, shared=shared)


async def _before_displaced(ledger: Ledger, task: Task) -> tuple[str | None, str]:
    """Return the state before the first of the displaced tasks, and when that one began."""
    same = (tasks.c.hive_id == task.hive_id, tasks.c.thread == task.thread, tasks.c.parent.is_(None))
    before, since, next_at = None, "", write_time(task.created_at)
    told = (tasks.c.status, tasks.c.checkpoint, tasks.c.created_at, tasks.c.started_at, tasks.c.ended_at)
    earlier = select(*told).where(*same, tasks.c.created_at < next_at).order_by(tasks.c.created_at.desc()).limit(_MOST)
    async with ledger.database.read() as connection:
        rows = (await connection.execute(earlier)).all()
    for row in rows:
        if row.status != "cancelled" or row.ended_at < next_at:
            break
        if row.checkpoint is not None:  # one that never began has nothing to undo, but stands between
            before, since = row.checkpoint, row.started_at
        next_at = row.created_at
    return before, since
