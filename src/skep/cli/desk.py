"""Open the program for one command, and close it whatever happens."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from skep.config.environment import Environment

if TYPE_CHECKING:
    from skep.app.apiary import Apiary
    from skep.app.choosing import Chooser
    from skep.app.program import Program
    from skep.app.residence import Residence
    from skep.config import Settings
    from skep.sandbox.sandbox import Sandbox
    from skep.sandbox.stack import Mount
    from skep.sessions.ledger import Ledger
    from skep.sessions.session import Session
    from skep.sessions.sessions import Sessions
    from skep.state.events import Event
    from skep.state.hives import Hive

T = TypeVar("T")

DEFAULT_ACCOUNT = "default"
#: The thread of a person at a terminal.
DEFAULT_THREAD = "cli:default"
debugging: ContextVar[bool] = ContextVar("debugging", default=False)


def complete_account(incomplete: str) -> list[str]:
    async def ids(program: Program) -> list[str]:
        return [account.id for account in await program.accounts.list()]

    return [name for name in _complete(ids) if name.startswith(incomplete)]


def complete_hive(incomplete: str) -> list[str]:
    async def names(program: Program) -> list[str]:
        return [hive.name for hive in await program.hives.list()]

    return [name for name in _complete(names) if name.startswith(incomplete)]


Account = Annotated[
    str,
    typer.Option(
        "--account",
        "-a",
        help="The account that owns the hive.",
        autocompletion=complete_account,
        metavar="ID",
    ),
]
HiveReference = Annotated[
    str,
    typer.Argument(help="Name or id of the hive.", autocompletion=complete_hive, metavar="HIVE", show_default=False),
]
Thread = Annotated[
    str,
    typer.Option(
        "--thread",
        help="Which thread of the hive, for one whose threads have a workspace each (skep hive set … threads=thread).",
        metavar="KEY",
    ),
]
Confirmed = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]


def settle() -> tuple[Environment, Settings]:
    """Read the environment and the settings, and start the logs."""
    from skep.config.file import load

    environment = Environment.read()
    settings = load(environment.paths)
    start_logging(environment, file=environment.paths.log_file)
    return environment, settings


def start_logging(environment: Environment, *, file: Path | None) -> None:
    from skep.app.logs import start_logs

    level = logging.DEBUG if debugging.get() else logging.WARNING
    start_logs(file=file, secrets=environment.secrets, level=level)


def with_program(work: Callable[[Program], Awaitable[T]]) -> T:
    """Run one piece of work with the program open."""
    environment, settings = settle()

    async def open_and_work() -> T:
        from skep.app.program import open_program

        async with open_program(environment.paths, settings) as program:
            return await work(program)

    return asyncio.run(open_and_work())


def actor() -> str:
    """Name who types, for the log: cli:<user of this machine>."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    return "cli:" + "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)


def confirm(question: str, *, confirmed: bool) -> None:
    """Ask before something that cannot be undone; without a terminal to ask on, refuse."""
    import sys

    from skep.errors import InvalidRequest

    if confirmed:
        return
    if not sys.stdin.isatty():
        raise InvalidRequest(f"there is no terminal to ask on: {question}", hint="say it with --yes")
    typer.confirm(question, abort=True)


def check_statuses(asked: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """Return what was asked for if there are such statuses, or raise InvalidRequest that names them."""
    from skep.errors import InvalidRequest

    for status in asked:
        if status not in known:
            raise InvalidRequest(f"{status[:60]!a} is no status", hint=f"one of {', '.join(known)}")
    return asked


async def find_hive(program: Program, reference: str, account: str, *, deleted: bool = False) -> Hive:
    return await program.hives.show(reference, account_id=account, deleted=deleted)


def tell(text: str) -> None:
    """Say on stderr what takes its time."""
    import sys

    from skep.cli.terminal import printable

    sys.stderr.write(f"skep: {printable(text)}\n")
    sys.stderr.flush()


def open_chooser(environment: Environment, settings: Settings, program: Program | None = None) -> Chooser:
    """Return who says what holds a sandbox; only with the program open does it know what hives have chosen."""
    from skep.app.choosing import Chooser

    return Chooser(settings, environment.cloud_keys, program=program, tell=tell)


def open_apiary(environment: Environment, settings: Settings, program: Program | None = None) -> Apiary:
    """Open the apiary; to start a sandbox over the workspace of a hive, the program has to be open."""
    from skep.app.apiary import Apiary

    chooser = open_chooser(environment, settings, program)
    return Apiary(environment.paths, settings, environment.store_keys, chooser=chooser)


@asynccontextmanager
async def opened_program(environment: Environment, settings: Settings) -> AsyncIterator[Program]:
    from skep.app.program import open_program

    async with open_program(environment.paths, settings) as program:
        yield program


@asynccontextmanager
async def entered(
    hive: str, account: str, *, thread: str, allow: Sequence[str] = (), ticket: str | None = None
) -> AsyncIterator[Sandbox]:
    """Use the computer of a thread of a hive, or a workspace that is nobody's, until the end of the block."""
    environment, settings = settle()
    if not allow and ticket is None:  # a sandbox with more in it than the usual is this command's alone
        await _wake(environment, settings, hive, account, thread)
    async with opened_program(environment, settings) as program:
        apiary = open_apiary(environment, settings, program)
        residence = await lodge(program, apiary, hive, account, thread=thread)
        mounts = _ticket(program, residence, account, ticket)
        if residence.hive is None or residence.hive.deleted_at is not None:
            async with apiary.enter(residence.id, allow=allow, mounts=mounts) as sandbox:
                yield sandbox
            return
        async with opened_sessions(program, environment, allow=allow, mounts=mounts) as sessions:
            computer = await sessions.open(residence.hive, residence.session, account_id=account)
            async with computer.sandbox("exec") as sandbox:
                yield sandbox


async def _wake(environment: Environment, settings: Settings, hive: str, account: str, thread: str) -> None:
    """Let the server of this home, if there is one, run the computer: then what is left running in it stays."""
    if not (environment.paths.home / "run" / "server.json").exists():
        return
    from skep.app.waking import wake

    await asyncio.to_thread(wake, environment, settings, hive, account, thread=thread, actor=actor())


@asynccontextmanager
async def opened_sessions(
    program: Program, environment: Environment, *, allow: Sequence[str] = (), mounts: Sequence[Mount] = ()
) -> AsyncIterator[Sessions]:
    """Be a controller until the end of the block."""
    from skep.app.lodgings import Extras
    from skep.app.reception import open_sessions

    extras = Extras(tuple(allow), tuple(mounts))
    chooser = open_chooser(environment, program.settings, program)
    async with open_sessions(
        program, keys=environment.store_keys, tell=tell, extras=extras, chooser=chooser
    ) as sessions:
        yield sessions


def _ticket(program: Program, residence: Residence, account: str, name: str | None) -> list[Mount]:
    from skep.app.household import ticket

    if name is None:
        return []
    owner = residence.hive.account_id if residence.hive else account
    return [ticket(program.paths.home, owner, name)]


async def lodge(program: Program, apiary: Apiary, hive: str, account: str, *, thread: str) -> Residence:
    """Find the workspace that a person named, and refuse one in which nothing may run."""
    from skep.app.computer import require_sandbox
    from skep.app.residence import find
    from skep.errors import Denied

    residence = await find(program, apiary, hive, account, thread=thread)
    found = residence.hive
    if found is None and not apiary.has(residence.id):
        found = await find_hive(program, hive, account)  # says that there is none
    if found is not None:
        if found.deleted_at is not None and found.account_id != account:
            raise Denied(f"the hive {found.id} is not one of the account {account}", hint="name its account")
        require_sandbox(await program.rollouts.in_effect(found.flags, found.account_id), found.name)
    return residence


@dataclass(frozen=True, slots=True)
class Desk:
    """What a command on one workspace works with."""

    program: Program
    apiary: Apiary
    residence: Residence

    @property
    def id(self) -> str:
        return self.residence.id

    async def record(self, event: Event) -> None:
        from skep.app.residence import record

        await record(self.program, self.residence, event, actor=actor())

    def shown(self) -> Sequence[Mount]:
        """Return the folders that the hive's workspace shows, made if they are missing; nobody's shows none."""
        from skep.app.residence import household

        if self.residence.hive is None:
            return ()
        home = household(self.program, self.residence.hive)
        home.settle()
        return home.mounts()

    async def let_show(self) -> None:
        """Let the hive's workspace show the folders of the hive, wherever they are now, if it can be read."""
        from skep.errors import NotFound, WorkspaceDamaged

        if self.residence.hive is not None:
            with suppress(NotFound, WorkspaceDamaged):
                await self.apiary.let_show(self.id, self.shown())

    async def settle(self, *, template: str | None = None) -> bool:
        """Make the workspace unless it is there; say whether it was made."""
        from skep.state.events import WorkspaceCreated

        labels = self.residence.labels
        await self.begin_session()
        made = await self.apiary.settle(self.id, self.shown(), template=template, labels=labels, tell=tell)
        if made is not None:
            await self.record(WorkspaceCreated(template=made.template, snapshot=made.snapshot_version))
        return made is not None

    async def begin_session(self) -> None:
        """Take note, before it happens, that a workspace is made where one was deleted; what is deleted is swept."""
        from skep.sessions.ledger import Roll

        row = await Roll(self.program.database).find(self.id)
        if row is None or row.status != "destroyed":
            return
        async with self._claimed(row) as (ledger, session):
            if session is not None:
                await ledger.change(session, "creating", reason=f"{actor()} makes its workspace anew")

    async def close_session(self, archive: str | None) -> None:
        """Take note that the workspace of a session was removed, after it was archived or for good."""
        from skep.sessions.ledger import Roll
        from skep.sessions.session import RUNNING

        row, reason = await Roll(self.program.database).find(self.id), f"{actor()} removed its workspace"
        if row is None or row.status in ("destroyed", "archived"):
            return
        async with self._claimed(row) as (ledger, session):
            if session is None:
                return
            if archive is None:
                await ledger.change(session, "destroyed", reason=reason, archive=None, rooms={}, generation=0)
                return
            running = session.status in RUNNING
            at_rest = await ledger.change(session, "stopped", reason=reason) if running else session
            await ledger.change(at_rest, "archived", reason=reason, archive=archive)

    @asynccontextmanager
    async def _claimed(self, row: Session) -> AsyncIterator[tuple[Ledger, Session | None]]:
        """Have a session, if no other process has it."""
        from skep.app.reception import open_sessions

        async with open_sessions(self.program) as sessions:
            session = await sessions.ledger.claim(row, reason="")
            try:
                yield sessions.ledger, session
            finally:
                if session is not None:
                    await sessions.ledger.release(await sessions.ledger.get(self.id))


def with_workspace(reference: str, account: str, work: Callable[[Desk], Awaitable[T]]) -> T:
    """Run one piece of work on the workspace that a person named."""
    environment, settings = settle()

    async def find_and_work(program: Program) -> T:
        from skep.app.residence import find

        apiary = open_apiary(environment, settings, program)
        return await work(Desk(program, apiary, await find(program, apiary, reference, account)))

    return with_program(find_and_work)


def complete_workspace(incomplete: str) -> list[str]:
    from skep.config import load
    from skep.errors import SkepError

    environment = Environment.read()
    try:
        ids = open_apiary(environment, load(environment.paths)).ids()
    except SkepError:  # completion has no place to show an error
        return []
    return [*complete_hive(incomplete), *(name for name in ids if name.startswith(incomplete))]


def _complete(names: Callable[[Program], Awaitable[list[str]]]) -> list[str]:
    from skep.errors import SkepError

    try:
        return with_program(names)
    except SkepError:  # completion has no place to show an error
        return []
