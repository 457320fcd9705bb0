"""skep run: ask a hive for something, and see it done."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from skep.cli.desk import DEFAULT_ACCOUNT, DEFAULT_THREAD, Account, actor, complete_hive, settle, tell
from skep.cli.terminal import INTERRUPTED, AsJson, examples, print_json, print_line

if TYPE_CHECKING:
    from skep.app.carrier import Carrier
    from skep.cli.interrupting import Interrupts
    from skep.tasks.task import Task

T = TypeVar("T")

HiveOption = Annotated[
    str | None,
    typer.Option(
        "--hive",
        "-H",
        help="The hive that is asked; it can be left out where there is only one.",
        autocompletion=complete_hive,
        metavar="HIVE",
        show_default=False,
    ),
]
Unfollowed = Annotated[bool, typer.Option("--no-follow", help="Print the task, and do not wait for its end.")]

EPILOG = examples(
    "skep run 'Sum up report.csv' --hive garden",
    "skep run - --hive garden < prompt.txt  # the prompt from a file",
    "skep run 'Write the tests' --no-follow  # a server carries it: skep serve",
    "skep run 'Sum up report.csv' --json | jq -r .type  # what happens, for a program",
)


def run(
    prompt: Annotated[
        str,
        typer.Argument(help="What you want, in words; - reads it from stdin.", metavar="PROMPT", show_default=False),
    ],
    hive: HiveOption = None,
    account: Account = DEFAULT_ACCOUNT,
    thread: Annotated[
        str, typer.Option("--thread", help="The conversation that it belongs to.", metavar="KEY")
    ] = DEFAULT_THREAD,
    key: Annotated[
        str | None,
        typer.Option("--key", help="The same key again shows the task that it made first.", show_default=False),
    ] = None,
    no_follow: Unfollowed = False,
    as_json: AsJson = False,
) -> None:
    """Ask a hive for something, and watch until it replies.

    The reply goes to stdout, what happens on the way to stderr; with --json the events go to stdout, one to a line.
    The exit code is 0 when the task succeeded and 1 when it failed. Ctrl-C ends the task; twice does not wait for
    that, and says what becomes of it.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    carry(
        account,
        lambda carrier: carrier.submit(hive, text, thread=thread, key=key),
        follow=not no_follow,
        as_json=as_json,
    )


def carry(account: str, begin: Callable[[Carrier], Awaitable[Task]], *, follow: bool, as_json: bool) -> None:
    """Have a task begun and, unless it is to be left alone, follow it; the exit code says how it ended."""

    async def work(carrier: Carrier) -> int:
        from skep.cli.interrupting import Interrupts

        interrupts = Interrupts(carrier)
        try:
            task = await begin(carrier)
            if not follow:
                print_accepted(task, as_json=as_json)
                return 0
            interrupts.aim_at(task)
            return await _follow(carrier, task, interrupts, as_json=as_json)
        except asyncio.CancelledError:
            await interrupts.leave()
            raise

    try:
        code = with_tasks(account, work)
    except asyncio.CancelledError:  # a second Ctrl-C
        code = INTERRUPTED
    raise typer.Exit(code)


async def _follow(carrier: Carrier, task: Task, interrupts: Interrupts, *, as_json: bool) -> int:
    from skep.cli.following import Following

    if not as_json:
        tell(f"task {task.id}")
    async with carrier.working():
        return await Following(carrier, task, interrupts, as_json=as_json).run()


def print_accepted(task: Task, *, as_json: bool) -> None:
    if as_json:
        print_json(task.as_json())
    else:
        print_line(f"{task.id} is {task.status}; follow it with: skep task follow {task.id}")


def with_tasks(account: str, work: Callable[[Carrier], Awaitable[T]]) -> T:
    """Do something with tasks, at the server of this home or in this process."""
    environment, settings = settle()

    async def open_and_work() -> T:
        from skep.app.tasking import open_carrier

        async with open_carrier(environment, settings, account, actor=actor(), tell=tell) as carrier:
            return await work(carrier)

    return asyncio.run(open_and_work())
