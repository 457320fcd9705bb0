"""skep session: the computers of threads, as they are on record, and what can be done with them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.counter import with_session
from skep.cli.desk import (
    DEFAULT_ACCOUNT,
    DEFAULT_THREAD,
    Account,
    Confirmed,
    Thread,
    check_statuses,
    complete_account,
    complete_hive,
    complete_workspace,
    confirm,
    with_program,
)
from skep.cli.terminal import AsJson, examples, print_cells, print_fields, print_json, print_line, print_table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rich.table import Table

    from skep.app.program import Program
    from skep.cli.counter import Counter
    from skep.sessions.reaper import Round
    from skep.sessions.session import Session
    from skep.state.events import Recorded

app = typer.Typer(help="Look after sessions: the computers of threads, which are found again.", no_args_is_help=True)

SessionReference = Annotated[
    str,
    typer.Argument(
        help="Id of the session, or name of its hive.",
        autocompletion=complete_workspace,
        metavar="SESSION",
        show_default=False,
    ),
]
_COLUMNS = ("ID", "HIVE", "KEY", "STATUS", "LAST USED (UTC)", "STARTS", "TROUBLE")
_LOOK_S = 0.5
#: What is on record about bringing a computer back.
_DEEDS = ("session_changed", "workspace_created", "workspace_repaired", "outage_began", "outage_ended")

Row = tuple["Session", str]


@app.command(
    "list",
    epilog=examples(
        "skep session list",
        "skep session list --hive garden --status active --status error",
        "skep session list --watch  # Ctrl-C ends it",
        "skep session list --watch --json | jq -r .status  # a line for every change",
    ),
)
def list_(
    account: Annotated[
        str | None,
        typer.Option(
            "--account", "-a", help="Only those of this account.", autocompletion=complete_account, metavar="ID"
        ),
    ] = None,
    hive: Annotated[
        str | None,
        typer.Option("--hive", "-H", help="Only those of this hive.", autocompletion=complete_hive, metavar="HIVE"),
    ] = None,
    statuses: Annotated[
        list[str] | None,
        typer.Option("--status", help="Only those in this status; may be repeated.", metavar="STATUS"),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on, and show every change.")] = False,
    as_json: AsJson = False,
) -> None:
    """List sessions, those used last first."""
    from skep.sessions.session import STATUSES

    read = _reader(account, hive, check_statuses(statuses or [], STATUSES))
    if watch:
        with_program(lambda program: _watch(program, read, as_json=as_json))
        return
    rows = with_program(read)
    if as_json:
        print_json([as_data(*row) for row in rows])
        return
    print_table(
        _COLUMNS,
        [_cells(*row) for row in rows],
        empty="There are no sessions yet. The first command in a hive begins one: skep exec --hive garden -- ls",
    )


def _reader(
    account: str | None, hive: str | None, statuses: Sequence[str]
) -> Callable[[Program], Awaitable[list[Row]]]:
    async def read(program: Program) -> list[Row]:
        from skep.sessions.ledger import Roll

        names = {one.id: one.name for one in await program.hives.list(account_id=account, deleted=True)}
        found = await Roll(program.database).list(account_id=account)
        rows = [(session, names.get(session.hive_id, "")) for session in found]
        return [
            (session, name)
            for session, name in rows
            if (hive is None or hive in (name, session.hive_id)) and (not statuses or session.status in statuses)
        ]

    return read


async def _watch(program: Program, read: Callable[[Program], Awaitable[list[Row]]], *, as_json: bool) -> None:
    """Show the sessions again and again: on a terminal as a table that changes, else a line for every change."""
    import sys

    if sys.stdout.isatty() and not as_json:
        from rich.live import Live

        from skep.cli.terminal import console

        with Live(_table(await read(program)), console=console(), auto_refresh=False, screen=False) as live:
            while True:
                await asyncio.sleep(_LOOK_S)
                live.update(_table(await read(program)), refresh=True)
    seen: dict[str, tuple[object, ...]] = {}
    while True:
        for session, name in await read(program):
            now = (session.status, session.changed_at, session.generation)
            if seen.get(session.id) != now:
                seen[session.id] = now
                _print_change(session, name, as_json=as_json)
        sys.stdout.flush()
        await asyncio.sleep(_LOOK_S)


def _print_change(session: Session, hive: str, *, as_json: bool) -> None:
    if as_json:
        print_json(as_data(session, hive))
    else:
        print_cells(*_cells(session, hive))


def _table(rows: Sequence[Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from skep.cli.terminal import printable

    colours = {"active": "green", "error": "red", "destroyed": "dim", "archived": "cyan", "stopped": "yellow"}
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for session, hive in rows:
        cells = [Text(printable(cell)) for cell in _cells(session, hive)]
        cells[3].stylize(colours.get(session.status, ""))
        table.add_row(*cells)
    return table


def _cells(session: Session, hive: str) -> tuple[str, ...]:
    used, starts = f"{session.active_at:%Y-%m-%d %H:%M:%S}", str(session.generation)
    return (session.id, hive, session.key, session.status, used, starts, session.last_error or "")


def as_data(session: Session, hive: str) -> dict[str, object]:
    """Return a session as JSON has it."""
    values = {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(session).items()
    }
    return {**values, "hive": hive}


@app.command(
    epilog=examples(
        "skep session show garden", "skep session show garden --thread slack:C1:1700.1", "skep session show ID --json"
    )
)
def show(
    session: SessionReference,
    thread: Thread = DEFAULT_THREAD,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Show one session: its status and why, who runs it, and what is kept of it."""

    async def work(counter: Counter) -> tuple[Session, str, list[Recorded]]:
        return await counter.row(), counter.hive.name, await counter.recorded(types=("session_changed",), last=5)

    found, hive, changes = with_session(session, account, thread, "show", work)
    if as_json:
        steps = [{**one.event.model_dump(mode="json"), "at": one.at.isoformat()} for one in changes]
        print_json({**as_data(found, hive), "changes": steps})
        return
    print_fields(_fields(found, hive))
    print_line("")
    rows = [(f"{one.at:%Y-%m-%d %H:%M:%S}", *_step(one)) for one in changes]
    print_table(("CHANGED (UTC)", "FROM", "TO", "BECAUSE"), rows, empty="")


def _step(recorded: Recorded) -> tuple[str, str, str]:
    event = recorded.event.model_dump()
    return str(event["before"] or ""), str(event["after"]), str(event["reason"])


def _fields(session: Session, hive: str) -> dict[str, str]:
    def told(at: datetime | None) -> str:
        return f"{at:%Y-%m-%d %H:%M:%S} UTC" if at else "never"

    return {
        "id": session.id,
        "hive": f"{hive} ({session.hive_id})",
        "account": session.account_id,
        "key": session.key,
        "status": f"{session.status}, since {told(session.changed_at)}",
        "created": told(session.created_at),
        "last used": told(session.active_at),
        "last healthy": told(session.healthy_at),
        "starts": str(session.generation),
        "failures": f"{session.resume_fail_count}" + (f"; {session.last_error}" if session.last_error else ""),
        "host": session.host or "none",
        "run by": session.controller or "nobody",
        "archive": session.archive or "none",
        "brought back": told(session.unarchived_at),
        "deletion announced": told(session.warned_at),
        "rooms": ", ".join(sorted(session.rooms)) or "none",
    }


@app.command(
    epilog=examples(
        "skep session resolve garden  # is its computer well? what had to be done?",
        "skep session resolve garden --recreate  # if the workspace is lost for good",
    )
)
def resolve(
    session: SessionReference,
    thread: Thread = DEFAULT_THREAD,
    recreate: Annotated[
        bool, typer.Option("--recreate", help="Make a workspace that is missing anew, with nothing in it.")
    ] = False,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Bring the computer of a thread up and see that it answers. It ends with this command; its workspace stays."""

    async def work(counter: Counter) -> tuple[dict[str, object], list[Recorded], str | None]:
        before = await counter.last_seq()
        async with counter.computer(account, recreate=recreate) as computer:
            row = await counter.row() if computer.down is None else counter.residence.session
            deeds = await counter.recorded(types=_DEEDS, after=before)
            return as_data(row, counter.hive.name), deeds, computer.down

    found, deeds, down = with_session(session, account, thread, "resolve", work)
    if as_json:
        did = [one.event.model_dump(mode="json") for one in deeds]
        print_json({**found, "did": did, "down": down})
        return
    for line in map(_deed, deeds):
        print_line(line)
    well = f"{found['id']} is {found['status']}, and answers"
    print_line(f"no sandbox can be had for now: {down}" if down else well)


def _deed(recorded: Recorded) -> str:
    event = recorded.event.model_dump(mode="json")
    match event["type"]:
        case "session_changed":
            return f"{event['before'] or 'new'} -> {event['after']}: {event['reason']}"
        case "workspace_repaired":
            done, left = "; ".join(event["done"]) or "nothing", "; ".join(event["left"]) or "nothing"
            return f"repaired: {done}; lost or left: {left}"
        case kind:
            return str(kind).replace("_", " ")


@app.command(epilog=examples("skep session stop garden"))
def stop(
    session: SessionReference,
    thread: Thread = DEFAULT_THREAD,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """End the sandbox of a session, whichever process of this machine runs it. Its workspace stays."""
    from skep.sessions.putting_away import stop

    _act(session, account, thread, "stop", lambda counter: counter.act(stop), as_json=as_json)


@app.command(epilog=examples("skep session archive garden  # the next command in it brings it back"))
def archive(
    session: SessionReference,
    thread: Thread = DEFAULT_THREAD,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Save the workspace of a session, encrypted, and free its folder. What runs in it is ended."""
    from skep.sessions.putting_away import archive

    _act(session, account, thread, "archive", lambda counter: counter.act(archive), as_json=as_json)


@app.command(epilog=examples("skep session restore garden"))
def restore(
    session: SessionReference,
    thread: Thread = DEFAULT_THREAD,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Bring the workspace of an archived session back, without starting anything in it."""
    from skep.sessions.putting_away import restore

    _act(session, account, thread, "restore", lambda counter: counter.act(restore), as_json=as_json)


@app.command(epilog=examples("skep session delete garden  # asks first", "skep session delete ID --yes"))
def delete(
    session: SessionReference,
    thread: Thread = DEFAULT_THREAD,
    account: Account = DEFAULT_ACCOUNT,
    yes: Confirmed = False,
    as_json: AsJson = False,
) -> None:
    """Remove the workspace and the archives of a session for good. Its key can be used again, and starts empty."""
    from skep.sessions.putting_away import delete

    confirm(f"delete the workspace and the archives of {session[:60]!a} for good?", confirmed=yes)
    _act(session, account, thread, "delete", lambda counter: counter.act(delete), as_json=as_json)


def _act(
    session: str,
    account: str,
    thread: str,
    name: str,
    act: Callable[[Counter], Awaitable[tuple[Session, str]]],
    *,
    as_json: bool,
) -> None:
    found, hive = with_session(session, account, thread, name, act)
    if as_json:
        print_json(as_data(found, hive))
    else:
        print_line(f"{found.id} is {found.status}" + (f" as {found.archive}" if found.status == "archived" else ""))


@app.command(epilog=examples("skep session sweep  # as a server does every few seconds", "skep session sweep --json"))
def sweep(as_json: AsJson = False) -> None:
    """Put away what nobody uses, by each hive's settings, and clean up after processes that died."""
    from skep.cli.counter import sweep_sessions

    did: Round | None = sweep_sessions()
    if as_json:
        print_json(None if did is None else asdict(did))
        return
    if did is None:
        print_line("another process of this machine does it at this moment")
        return
    for session_id, deed in did.done.items():
        print_line(f"{session_id}: {deed}")
    for session_id, problem in did.failed.items():
        print_line(f"{session_id}: failed, {problem}")
    print_line(f"{len(did.done)} put away or cleaned up, {len(did.failed)} failed")
