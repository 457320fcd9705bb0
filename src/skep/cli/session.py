"""Open the program for one command, and close it whatever happens."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from skep.config.environment import Environment

if TYPE_CHECKING:
    from skep.app.program import Program
    from skep.config import Settings
    from skep.state.hives import Hive

T = TypeVar("T")

DEFAULT_ACCOUNT = "default"
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


async def find_hive(program: Program, reference: str, account: str, *, deleted: bool = False) -> Hive:
    return await program.hives.show(reference, account_id=account, deleted=deleted)


def hive_id_for(hive: str, account: str) -> str:
    """Find the id of a hive whose sandbox may be used."""

    async def work(program: Program) -> str:
        from skep.app.computer import require_sandbox

        found = await find_hive(program, hive, account)
        require_sandbox(await program.rollouts.in_effect(found.flags, found.account_id), found.name)
        return found.id

    return with_program(work)


def _complete(names: Callable[[Program], Awaitable[list[str]]]) -> list[str]:
    from skep.errors import SkepError

    try:
        return with_program(names)
    except SkepError:  # completion has no place to show an error
        return []
