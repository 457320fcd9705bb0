"""A workspace as a person names it, and the record of what is done to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skep.app.apiary import Apiary
from skep.app.household import Household
from skep.app.program import Program
from skep.errors import Conflict, NotFound
from skep.state.events import Event
from skep.state.hives import Hive
from skep.state.names import is_hive_id


@dataclass(frozen=True, slots=True)
class Residence:
    """A workspace, and the hive whose it is; a workspace may be nobody's."""

    id: str
    hive: Hive | None = None

    @property
    def title(self) -> str:
        """What a person calls it."""
        return self.id if self.hive is None else self.hive.name


def household(program: Program, hive: Hive) -> Household:
    """Return the folders of a hive on this machine."""
    return Household(program.paths.home, hive.id, hive.account_id, hive.name)


async def find(program: Program, apiary: Apiary, reference: str, account_id: str) -> Residence:
    """Find a workspace by its own id, or by the name or the id of the hive whose it is.

    A name means the account's hive of that name, unless that one has no workspace and there is one with this id.
    A hive's id is understood whichever account it belongs to, and after the hive was deleted: its workspace stays.
    """
    if is_hive_id(reference):
        every = await program.hives.list(deleted=True)
        return Residence(reference, next((hive for hive in every if hive.id == reference), None))
    try:
        hive = await program.hives.show(reference, account_id=account_id)
    except NotFound:
        return Residence(reference)
    if not apiary.has(hive.id) and apiary.has(reference):
        return Residence(reference)
    return Residence(hive.id, hive)


async def record(program: Program, residence: Residence, event: Event, *, actor: str) -> None:
    """Write down what was done to a workspace, in the log of the hive whose it is."""
    if (hive := residence.hive) is not None:
        await program.log.append(event, hive_id=hive.id, account_id=hive.account_id, actor=actor)


async def keep_apart(program: Program, ids: Sequence[str], account_id: str) -> None:
    """Refuse ids for workspaces that a person would take for hives."""
    names = {hive.name for hive in await program.hives.list(account_id=account_id)}
    for one in ids:
        if one in names or is_hive_id(one):
            raise Conflict(f"{one} is a hive, which has a workspace of its own", hint="choose another id")
