"""The sessions of a program: where threads of hives are received, and find their computers again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skep.app.apiary import Apiary, Tell, quiet
from skep.app.choosing import Chooser
from skep.app.lodgings import Extras, Lodgings
from skep.app.program import Program
from skep.config.secrets import StoreKeys
from skep.errors import SandboxDisabled
from skep.sessions import putting_away
from skep.sessions.controller import Controller, host_name
from skep.sessions.ledger import ACTOR, Ledger
from skep.sessions.loops import Loops
from skep.sessions.outages import Outages
from skep.sessions.reaper import Reaper
from skep.sessions.session import Session
from skep.sessions.sessions import Sessions
from skep.state.events import WorkspaceCreated
from skep.state.hives import Hive
from skep.workspace.manifest import Manifest


@asynccontextmanager
async def open_sessions(
    program: Program,
    *,
    keys: StoreKeys | None = None,
    tell: Tell = quiet,
    extras: Extras | None = None,
    chooser: Chooser | None = None,
) -> AsyncIterator[Sessions]:
    """Be a process that runs sandboxes until the end of the block; then they end, and their workspaces stay.

    Other processes that have joined one of them are waited for, unless it is a cancellation that ends the block. What
    nobody uses is put away meanwhile.
    """
    controller = await Controller.start(program.leases, host_name(program.paths.home))
    try:
        chooser = chooser or Chooser(program.settings, program=program, tell=tell)
        apiary = Apiary(program.paths, program.settings, keys, chooser=chooser)
        sessions = _sessions(program, controller, apiary, tell=tell, extras=extras)
        try:
            async with _looked_after(program, sessions):
                yield sessions
        except (asyncio.CancelledError, KeyboardInterrupt):
            await putting_away.stop_all(sessions, patient=False)
            raise
        finally:
            await putting_away.stop_all(sessions)
    finally:
        await controller.stop()


@asynccontextmanager
async def _looked_after(program: Program, sessions: Sessions) -> AsyncIterator[None]:
    reaper = Reaper(sessions, program.hives, program.leases)
    async with Loops().kept({"the reaper": reaper.run}):
        yield


def _sessions(
    program: Program, controller: Controller, apiary: Apiary, *, tell: Tell, extras: Extras | None
) -> Sessions:
    async def find_hive(session: Session) -> Hive:
        return await program.hives.show(session.hive_id, account_id=session.account_id, deleted=True)

    async def on_made(session: Session, made: Manifest) -> None:
        event = WorkspaceCreated(template=made.template, snapshot=made.snapshot_version)
        await program.log.append(event, hive_id=session.hive_id, account_id=session.account_id, actor=ACTOR)

    async def leave(session_id: str) -> object:
        return await putting_away.stop(sessions, session_id, reason="another process asked for it")

    async def off(hive: Hive) -> SandboxDisabled | None:
        choice = await apiary.chooser.off(hive)
        return None if choice is None else SandboxDisabled(choice.why, hint=choice.options["hint"])

    ledger = Ledger(program.database, program.log, controller)
    lodgings = Lodgings(apiary, find_hive, tell=tell, on_made=on_made, extras=extras)
    lodgings.let_leave(leave)
    outages = Outages(program.database, program.log, now=ledger.now)
    sessions = Sessions(ledger, lodgings, outages, off=off, suits=apiary.chooser.suits)
    return sessions
