"""skep exec and skep shell: run commands in a sandbox."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from skep.cli.desk import (
    DEFAULT_ACCOUNT,
    DEFAULT_THREAD,
    Account,
    Thread,
    complete_workspace,
    entered,
    open_chooser,
    settle,
)
from skep.cli.terminal import AsJson, examples, print_json

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Execution, Exit, Sandbox

HiveOption = Annotated[
    str | None,
    typer.Option(
        "--hive",
        "-H",
        help="Work in the workspace of this hive, or in the one with this id; without it in one that is thrown away.",
        autocompletion=complete_workspace,
        metavar="HIVE",
        show_default=False,
    ),
]
UserOption = Annotated[
    Literal["agent", "root"], typer.Option("--user", "-u", help="Who to be inside; root is fake and has no privilege.")
]
CwdOption = Annotated[
    str | None, typer.Option("--cwd", help="Folder to start in, below /workspace unless absolute.", show_default=False)
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout", help="Seconds after which it is ended; without it there is no limit.", show_default=False
    ),
]

AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        help="Let it reach a host, *.suffix, host:port, or a set (pypi, npm, debian, github); may be repeated.",
        metavar="HOST",
        show_default=False,
    ),
]

TicketOption = Annotated[
    str | None,
    typer.Option(
        "--ticket",
        help="Show the folder that the account's hives share under this name, at /workspace/ticket.",
        metavar="NAME",
        show_default=False,
    ),
]

EXEC_EPILOG = examples(
    "skep exec -- python3 -c 'print(6*7)'  # in a throwaway sandbox",
    "skep exec --hive garden -- make test  # in the hive's workspace",
    "skep exec --hive garden --ticket spring -- ls ticket  # with a folder that hives share",
    "cat data.csv | skep exec -- wc -l  # pipes work as with a local command",
    "skep exec --allow pypi -- pip download six  # nothing else can be reached",
)
SHELL_EPILOG = examples("skep shell", "skep shell --hive garden", "skep shell --hive garden --user root")

_PROMPT = r"\[\e[1;33m\]skep\[\e[0m\]:\w\$ "


def exec_(  # noqa: PLR0913, PLR0917  one per option
    command: Annotated[
        list[str],
        typer.Argument(help="The command and its arguments, after --.", metavar="COMMAND…", show_default=False),
    ],
    hive: HiveOption = None,
    account: Account = DEFAULT_ACCOUNT,
    thread: Thread = DEFAULT_THREAD,
    user: UserOption = "agent",
    cwd: CwdOption = None,
    timeout: TimeoutOption = None,
    allow: AllowOption = None,
    ticket: TicketOption = None,
    as_json: AsJson = False,
) -> None:
    """Run a command in a sandbox: no network unless allowed, no secrets, nothing of this machine but its programs.

    Input, output, signals, colours, terminal size and the exit code are those of the command, as if it were local.
    """
    from skep.cli.relay import on_terminal, relay, window

    async def work(sandbox: Sandbox) -> int:
        if as_json:
            ended = await sandbox.run(command, input=_piped_input(), cwd=cwd, user=user, timeout_s=timeout)
            print_json(_as_json(ended))
            return ended.exit_code
        terminal = on_terminal()
        process = await sandbox.start(
            command,
            cwd=cwd,
            user=user,
            stdin=True,
            terminal=window() if terminal else None,
            timeout_s=timeout,
        )
        return _explained(await relay(process, terminal=terminal))

    with _hinting(command):
        code = _in_sandbox(_opened(hive, account, thread, allow or (), ticket), work)
    raise typer.Exit(code)


@contextmanager
def _hinting(command: Sequence[str]) -> Iterator[None]:
    """Tell who gave a line of shell where a program was meant how to do it."""
    from skep.errors import InvalidRequest

    try:
        yield
    except InvalidRequest as error:
        if len(command) > 1 or " " not in command[0] or not error.message.startswith("cannot run"):
            raise
        hint = "give a line of shell to a shell: skep exec -- sh -c LINE"
        raise InvalidRequest(error.message, hint=hint) from error


def shell(
    hive: HiveOption = None,
    account: Account = DEFAULT_ACCOUNT,
    thread: Thread = DEFAULT_THREAD,
    user: UserOption = "agent",
    cwd: CwdOption = None,
    allow: AllowOption = None,
    ticket: TicketOption = None,
) -> None:
    """Open a terminal in a sandbox. Leave it with exit or Ctrl-D.

    In the workspace of a hive whose computer goes on (see: skep serve), the next shell begins where this one was left:
    in its folder, with its variables and functions.
    """
    from skep.cli.relay import on_terminal, relay, window
    from skep.errors import InvalidRequest

    if not on_terminal():
        raise InvalidRequest("a shell needs a terminal", hint="to run a script: skep exec -- bash script.sh")

    async def work(sandbox: Sandbox) -> int:
        from skep.sandbox.shell import lay_profile

        profile = await lay_profile(sandbox, user=user, prompt=_PROMPT, stay=cwd is not None)
        process = await sandbox.start(
            ["/bin/bash", "--rcfile", profile, "-i"],
            cwd=cwd,
            env={"HISTFILE": "/tmp/.history"},  # noqa: S108  inside the sandbox
            user=user,
            terminal=window(),
        )
        return _explained(await relay(process, terminal=True))

    raise typer.Exit(_in_sandbox(_opened(hive, account, thread, allow or (), ticket), work))


def _in_sandbox(opened: AbstractAsyncContextManager[Sandbox], work: Callable[[Sandbox], Awaitable[int]]) -> int:
    import asyncio

    async def open_and_work() -> int:
        async with opened as sandbox:
            return await work(sandbox)

    return asyncio.run(open_and_work())


def _opened(
    hive: str | None, account: str, thread: str, allow: Sequence[str], ticket: str | None
) -> AbstractAsyncContextManager[Sandbox]:
    if hive is not None:
        return entered(hive, account, thread=thread, allow=allow, ticket=ticket)
    from skep.app.computer import open_sandbox
    from skep.errors import InvalidRequest

    if ticket is not None:
        raise InvalidRequest("a ticket is shown in the workspace of a hive", hint="name the hive with --hive")
    environment, settings = settle()
    return open_sandbox(settings, open_chooser(environment, settings), allow=allow)


def _piped_input() -> bytes:
    return b"" if sys.stdin.isatty() else sys.stdin.buffer.read()


def _explained(ended: Exit) -> int:
    """Say which limit ended a command, and pass its status on."""
    if ended.limit is not None:
        sys.stderr.write(f"skep: ended by the limit on {ended.limit}; see: skep config show\n")
    return ended.status


def _as_json(ended: Execution) -> dict[str, object]:
    return {
        "exit_code": ended.exit_code,
        "signal": ended.exit.signal,
        "limit": ended.limit,
        "stdout": ended.text,
        "stderr": ended.error_text,
        "truncated": ended.truncated,
        "duration_s": round(ended.duration_s, 6),
        "cpu_s": ended.exit.cpu_s,
        "peak_bytes": ended.exit.peak_bytes,
    }
