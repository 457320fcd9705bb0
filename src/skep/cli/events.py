"""skep events: read, follow, verify and export the log of a hive."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from skep.cli.desk import DEFAULT_ACCOUNT, Account, HiveReference, complete_hive, find_hive, with_program
from skep.cli.terminal import AsJson, Bar, console, examples, print_json, print_line, progress

if TYPE_CHECKING:
    from skep.app.program import Program
    from skep.state.chain import Fault, Verdict
    from skep.state.events import Recorded

app = typer.Typer(help="Read, follow, verify and export what happened.", no_args_is_help=True)

_TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"]


def complete_type(incomplete: str) -> list[str]:
    from skep.state.events import EVENT_TYPES

    return [name for name in sorted(EVENT_TYPES) if name.startswith(incomplete)]


Types = Annotated[
    list[str] | None,
    typer.Option(
        "--type",
        "-t",
        help="Only events of this type; may be repeated.",
        autocompletion=complete_type,
        metavar="TYPE",
    ),
]
Task = Annotated[str | None, typer.Option("--task", help="Only events of this task.", metavar="ID")]
After = Annotated[int, typer.Option(min=0, help="Only events after this sequence number.", metavar="N")]
AnyHive = Annotated[
    str | None,
    typer.Argument(
        help="Name or id of the hive; all hives when left out.",
        autocompletion=complete_hive,
        metavar="[HIVE]",
        show_default=False,
    ),
]


@app.command(
    "list",
    epilog=examples(
        "skep events list garden",
        "skep events list garden --type failed --since 2026-01-31",
        "skep events list garden --after 500 --limit 100 --json  # a page of JSON lines",
    ),
)
def list_(
    hive: HiveReference,
    after: After = 0,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many.", metavar="N")] = 100,
    types: Types = None,
    task: Task = None,
    since: Annotated[
        datetime | None, typer.Option(formats=_TIMES, help="From this time on (UTC).", metavar="TIME")
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(formats=_TIMES, help="Before this time (UTC).", metavar="TIME")
    ] = None,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """List events of a hive in order. With --json, one JSON object per line."""
    from skep.cli.eventline import EventPrinter

    async def work(program: Program) -> list[Recorded]:
        found = await find_hive(program, hive, account, deleted=True)
        return await program.log.page(
            found.id,
            after=after,
            limit=limit,
            types=types or (),
            task_id=task,
            since=_utc(since),
            until=_utc(until),
        )

    page = with_program(work)
    show = EventPrinter(as_json=as_json)
    for recorded in page:
        show(recorded)
    if not page and not as_json:
        console(stderr=True).print("[dim]No events match.[/dim]")
    if len(page) == limit and sys.stderr.isatty():
        console(stderr=True).print(f"[dim]There may be more: --after {page[-1].seq}[/dim]")


@app.command(
    epilog=examples(
        "skep events tail garden  # Ctrl-C ends it",
        "skep events tail garden --after 0 --json | jq .body  # everything, then live",
        "skep events tail garden --type failed --count 1 && notify-send 'something failed'",
    )
)
def tail(
    hive: HiveReference,
    after: Annotated[
        int | None,
        typer.Option(min=0, help="Begin after this sequence number.", metavar="N", show_default=False),
    ] = None,
    last: Annotated[int, typer.Option(min=0, help="Begin with so many of the newest events.", metavar="N")] = 10,
    count: Annotated[
        int | None, typer.Option(min=1, help="End after so many events.", metavar="N", show_default=False)
    ] = None,
    types: Types = None,
    task: Task = None,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Follow the events of a hive as they happen, without a gap and without a repetition."""
    from skep.cli.eventline import EventPrinter

    show = EventPrinter(as_json=as_json)

    async def work(program: Program) -> None:
        from skep.state.chain import total

        found = await find_hive(program, hive, account, deleted=True)
        begin = after if after is not None else max(0, await total(program.database, found.id) - last)
        left = count
        async for recorded in program.log.follow(found.id, after=begin, types=types or (), task_id=task):
            show(recorded)
            sys.stdout.flush()
            left = left - 1 if left is not None else None
            if left == 0:
                return

    with_program(work)


@app.command(
    epilog=examples(
        "skep events verify  # exit code 6 when a record is not as it was written",
        "skep events verify garden --json",
        "skep events verify --file garden.jsonl  # an export, without the database",
    )
)
def verify(
    hive: AnyHive = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Verify an export instead.", metavar="FILE", show_default=False),
    ] = None,
    public_key: Annotated[
        str | None,
        typer.Option(help="Key (64 hex digits) that must have signed the export's checkpoints.", metavar="KEY"),
    ] = None,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Verify that no record was changed, removed, swapped or cut off; name the first that was."""
    verdict = _verify_file(file, public_key) if file else _verify_database(hive, account)
    if as_json:
        print_json(_verdict_json(verdict))
        raise typer.Exit(0 if verdict.ok else 6)
    for remark in verdict.remarks:
        console(stderr=True).print(f"[dim]{remark}[/dim]")
    if not verdict.ok:
        raise _broken(verdict.faults)
    hives = "1 hive" if verdict.hives == 1 else f"{verdict.hives} hives"
    print_line(f"ok: {verdict.count:,} events of {hives}, every record as it was written")


@app.command(
    epilog=examples(
        "skep events export garden > garden.jsonl",
        "skep events export --output everything.jsonl  # all hives, with a progress bar",
    )
)
def export(
    hive: AnyHive = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write to this new file instead of stdout.", metavar="FILE"),
    ] = None,
    account: Account = DEFAULT_ACCOUNT,
) -> None:
    """Export events as JSON lines that can be verified without the database."""
    from skep.errors import Conflict, InvalidRequest

    async def work(program: Program) -> int:
        from skep.state.chain import total
        from skep.state.export import export as lines_of

        hive_id = (await find_hive(program, hive, account, deleted=True)).id if hive else None
        with progress("exporting", await total(program.database, hive_id)) as bar:
            lines = lines_of(program.database, hive_id, signer=program.signer)
            with stream or nullcontext(sys.stdout.buffer) as target:
                return await _write(lines, target, bar)

    try:
        # Opened first: a name that cannot be written should be known before the database is.
        stream = output.open("xb") if output else None
    except FileExistsError:
        raise Conflict(f"{output} exists already", hint="choose another name") from None
    except OSError as error:
        raise InvalidRequest(f"{output} cannot be written: {(error.strerror or '').lower()}") from error
    count = with_program(work)
    if output is not None:
        print_line(f"wrote {count:,} lines to {output}")


async def _write(lines: AsyncIterator[bytes], stream: BinaryIO, bar: Bar) -> int:
    count = 0
    async for line in lines:
        stream.write(line)
        count += 1
        if count % 500 == 0:
            bar.add(500)
    stream.flush()
    return count


def _verify_database(hive: str | None, account: str) -> Verdict:
    async def work(program: Program) -> Verdict:
        from skep.state.chain import total
        from skep.state.chain import verify as verify_log

        hive_id = (await find_hive(program, hive, account, deleted=True)).id if hive else None
        with progress("verifying", await total(program.database, hive_id)) as bar:
            return await verify_log(program.database, hive_id, signer=program.signer, progress=bar.add)

    return with_program(work)


def _verify_file(file: Path, public_key: str | None) -> Verdict:
    from skep.errors import InvalidRequest
    from skep.state.export import verify_export

    try:
        key = bytes.fromhex(public_key) if public_key else None
    except ValueError:
        raise InvalidRequest("the public key is not 64 hex digits", hint="copy it from the export") from None
    try:
        with file.open("rb") as lines:
            return verify_export((line.rstrip(b"\n") for line in lines), public_key=key)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {(error.strerror or '').lower()}") from error


def _broken(faults: tuple[Fault, ...]) -> Exception:
    from skep.errors import ChainBroken

    told = "\n  ".join(f"record {fault.seq} of {fault.hive_id}: {fault.reason}" for fault in faults)
    return ChainBroken(
        f"the log is not as it was written\n  {told}",
        hint="stop, keep a copy of the database and of its keys folder as evidence, and look who changed it",
    )


def _verdict_json(verdict: Verdict) -> dict[str, object]:
    from dataclasses import asdict

    first = verdict.first_bad
    return {**asdict(verdict), "ok": verdict.ok, "first_bad": asdict(first) if first else None}


def _utc(moment: datetime | None) -> datetime | None:
    from datetime import UTC

    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment
