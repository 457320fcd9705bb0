"""What a command on one session works with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from skep.cli.desk import find_hive, open_apiary, opened_sessions, settle, with_program

if TYPE_CHECKING:
    from skep.app.program import Program
    from skep.app.residence import Residence
    from skep.config.environment import Environment
    from skep.sessions.computer import Computer
    from skep.sessions.reaper import Round
    from skep.sessions.session import Session
    from skep.sessions.sessions import Sessions
    from skep.state.events import Recorded
    from skep.state.hives import Hive

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Counter:
    """What a command on one session works with."""

    program: Program
    environment: Environment
    residence: Residence
    hive: Hive

    @property
    def id(self) -> str:
        return self.residence.id

    async def row(self) -> Session:
        """Return the session as it is on record."""
        from skep.sessions.ledger import Roll

        return await Roll(self.program.database).get(self.id)

    @asynccontextmanager
    async def computer(self, account: str, *, recreate: bool = False) -> AsyncIterator[Computer]:
        """Use the computer of the session, if the hive may have one."""
        from skep.app.computer import require_sandbox

        hive, wanted = self.hive, self.residence.session
        require_sandbox(await self.program.rollouts.in_effect(hive.flags, hive.account_id), hive.name)
        async with opened_sessions(self.program, self.environment) as sessions:
            yield await sessions.open(hive, wanted, account_id=account, recreate=recreate)

    async def act(self, act: Callable[[Sessions, str], Awaitable[Session]]) -> tuple[Session, str]:
        """Do something with the session, which has to be on record; return it as it is then, with its hive's name."""
        await self.row()
        async with opened_sessions(self.program, self.environment) as sessions:
            return await act(sessions, self.id), self.hive.name

    async def last_seq(self) -> int:
        from skep.state.chain import total

        return await total(self.program.database, self.hive.id)

    async def recorded(self, *, types: Sequence[str], after: int = 0, last: int | None = None) -> list[Recorded]:
        """Return events of these types that are about the session, or about its workspace."""
        found: list[Recorded] = []
        while page := await self.program.log.page(self.hive.id, after=after, types=types):
            found += [one for one in page if getattr(one.event, "session", self.id) == self.id]
            after = page[-1].seq
        return found if last is None else found[-last:]


def with_session(reference: str, account: str, thread: str, act: str, work: Callable[[Counter], Awaitable[T]]) -> T:
    """Run one piece of work on the session that a person named, if it is their account's."""
    environment, settings = settle()

    async def find_and_work(program: Program) -> T:
        from skep.app.residence import authorize, find

        residence = await find(program, open_apiary(environment, settings, program), reference, account, thread=thread)
        hive = residence.hive or await find_hive(program, reference, account)  # says that there is none
        await authorize(program, residence, account, act)
        return await work(Counter(program, environment, residence, hive))

    return with_program(find_and_work)


def sweep_sessions() -> Round | None:
    """Let the reaper go round once."""
    environment, _ = settle()

    async def work(program: Program) -> Round | None:
        from skep.sessions.reaper import Reaper

        async with opened_sessions(program, environment) as sessions:
            return await Reaper(sessions, program.hives, program.leases).go_round()

    return with_program(work)
