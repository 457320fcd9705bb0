"""A workspace as a person names it, and the record of what is done to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from skep.app.apiary import Apiary
from skep.app.household import Household
from skep.app.lodgings import labels, take_over
from skep.app.program import Program
from skep.errors import Conflict, Denied, NotFound
from skep.sessions.key import key_of, session_id
from skep.sessions.ledger import ACTOR, Roll
from skep.sessions.session import Session
from skep.state.accounts import utc_now
from skep.state.events import AccessDenied, Event
from skep.state.hives import Hive
from skep.state.names import is_hive_id

#: The thread of a person at a terminal.
THREAD = "cli:default"
_SESSION_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Residence:
    """A workspace, and the hive whose it is with the key of its session; a workspace may be nobody's."""

    id: str
    hive: Hive | None = None
    key: str | None = None

    @property
    def title(self) -> str:
        """What a person calls it."""
        return self.id if self.hive is None else self.hive.name

    @property
    def labels(self) -> dict[str, str]:
        """What the workspace says about whose it is."""
        return {} if self.hive is None else labels(self.session)

    @property
    def session(self) -> Session:
        """What the session is like before it is on record."""
        hive, key, now = self.hive, self.key, utc_now()
        if hive is None or key is None:
            raise NotFound(f"the workspace {self.id} belongs to no session", hint="name a hive, or: skep session list")
        return Session(self.id, hive.account_id, hive.id, key, "creating", now, now, now)


def is_session_id(text: str) -> bool:
    """Say whether a text can be the id of a session."""
    return _SESSION_ID.fullmatch(text) is not None


def household(program: Program, hive: Hive) -> Household:
    """Return the folders of a hive on this machine."""
    return Household(program.paths.home, hive.id, hive.account_id, hive.name)


async def find(program: Program, apiary: Apiary, reference: str, account_id: str, *, thread: str = THREAD) -> Residence:
    """Find a workspace by its own id, or by the name or the id of the hive whose it is, as the thread has it.

    A name means the account's hive of that name, unless that one has no workspace and there is one with this id.
    A hive's id is understood whichever account it belongs to, and after the hive was deleted: its workspace stays.
    """
    if is_session_id(reference):
        return await _of_session(program, reference)
    if is_hive_id(reference):
        found = await _hive(program, reference)
        return Residence(reference) if found is None else await _of_hive(apiary, found, thread)
    try:
        hive = await program.hives.show(reference, account_id=account_id)
    except NotFound:
        return Residence(reference)
    residence = await _of_hive(apiary, hive, thread)
    return Residence(reference) if not apiary.has(residence.id) and apiary.has(reference) else residence


async def _of_session(program: Program, reference: str) -> Residence:
    row = await Roll(program.database).find(reference)
    hive = await _hive(program, row.hive_id) if row is not None else None
    return Residence(reference) if row is None or hive is None else Residence(reference, hive, row.key)


async def _of_hive(apiary: Apiary, hive: Hive, thread: str) -> Residence:
    key = key_of(hive, thread)
    residence = Residence(session_id(hive.account_id, hive.id, key), hive, key)
    await take_over(apiary, residence.session)
    return residence


async def _hive(program: Program, hive_id: str) -> Hive | None:
    every = await program.hives.list(deleted=True)
    return next((hive for hive in every if hive.id == hive_id), None)


async def authorize(program: Program, residence: Residence, account_id: str, act: str) -> None:
    """Refuse whoever is not of the account whose hive it is, and put that on record."""
    hive = residence.hive
    if hive is None or hive.account_id == account_id:
        return
    await record(
        program, residence, AccessDenied(session=residence.id, asked_by=account_id[:128], act=act), actor=ACTOR
    )
    raise Denied(
        f"the session {residence.id} is not one of the account {account_id[:60]!a}", hint="name its account: --account"
    )


async def record(program: Program, residence: Residence, event: Event, *, actor: str) -> None:
    """Write down what was done to a workspace, in the log of the hive whose it is."""
    if (hive := residence.hive) is not None:
        await program.log.append(event, hive_id=hive.id, account_id=hive.account_id, actor=actor)


async def keep_apart(program: Program, ids: Sequence[str], account_id: str) -> None:
    """Refuse ids for workspaces that a person would take for hives, or Skep for sessions."""
    names = {hive.name for hive in await program.hives.list(account_id=account_id)}
    for one in ids:
        if one in names or is_hive_id(one):
            raise Conflict(f"{one} is a hive, which has a workspace of its own", hint="choose another id")
        if is_session_id(one):
            raise Conflict(f"{one} reads like the id of a session", hint="choose another id")
