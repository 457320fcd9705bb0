"""skep doctor: check this machine."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.terminal import AsJson, console, examples, print_cells, print_json, printable

if TYPE_CHECKING:
    from rich.table import Table

    from skep.app.doctor import Check
    from skep.app.survey import Sighting
    from skep.config import Environment, Settings
    from skep.errors import ConfigInvalid

EPILOG = examples(
    "skep doctor  # exit code 0: usable, 5: something essential is missing",
    "skep doctor --bench  # make a few sandboxes with each mechanism that can be used, and time them",
    "skep doctor --json | jq '.checks[] | select(.status != \"ok\")'",
)
_MARKS = {"ok": "[green]ok[/green]", "degraded": "[yellow]degraded[/yellow]", "missing": "[red]missing[/red]"}


def doctor(
    bench: Annotated[bool, typer.Option("--bench", help="Time the mechanisms that can be used.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check the kernel, bwrap, the database, models and disk space; say how to put right what is not.

    A table tells which mechanisms can hold sandboxes here, and how far each isolates them.
    """
    from dataclasses import asdict

    from skep.app.doctor import is_usable
    from skep.errors import Unavailable

    checks, sightings = asyncio.run(_examine(*_settled(), bench=bench))
    usable = is_usable(checks)
    if as_json:
        mechanisms = [asdict(one) for one in sightings]
        print_json({"usable": usable, "checks": [asdict(check) for check in checks], "mechanisms": mechanisms})
    else:
        _print(checks, sightings)
    raise typer.Exit(0 if usable else Unavailable.exit_code)


def _settled() -> tuple[Environment, Settings | ConfigInvalid]:
    from skep.config import Environment, load
    from skep.errors import ConfigInvalid

    environment = Environment.read()
    try:
        return environment, load(environment.paths)
    except ConfigInvalid as error:
        return environment, error


async def _examine(
    environment: Environment, settings: Settings | ConfigInvalid, *, bench: bool
) -> tuple[list[Check], list[Sighting]]:
    from skep.app.doctor import examine
    from skep.app.survey import survey
    from skep.config import Settings

    known = settings if isinstance(settings, Settings) else Settings()
    return await examine(environment, settings), await survey(known, environment.cloud_keys, bench=bench)


def _print(checks: list[Check], sightings: list[Sighting]) -> None:
    if not sys.stdout.isatty():
        for check in checks:
            print_cells(check.status, check.name, check.found, *([f"fix: {check.fix}"] if check.fix else []))
        for one in sightings:
            print_cells("mechanism", *_cells(one), *([f"fix: {one.fix}"] if one.fix else []))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3, 0, 0))
    for check in checks:
        found = Text(printable(check.found))
        if check.fix:
            found.append("\nfix: ", "bold cyan").append(printable(check.fix))
        table.add_row(f"  {_MARKS[check.status]}", Text(check.name, "bold"), found)
    screen = console()
    screen.print()
    screen.print(table)
    screen.print()
    screen.print(_mechanisms(sightings))
    screen.print(f"\n{_summary(checks)}")


def _mechanisms(sightings: list[Sighting]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 1))
    for column in ("MECHANISM", "USABLE", "ISOLATION", "FOUND"):
        table.add_column(column)
    for one in sightings:
        name, is_usable, isolation, *said = _cells(one)
        found = Text(printable("; ".join(said)))
        if one.fix:
            found.append("\nfix: ", "bold cyan").append(printable(one.fix))
        table.add_row(name, Text(is_usable, "green" if one.usable else "yellow"), isolation, found)
    return table


def _cells(one: Sighting) -> list[str]:
    times = []
    if one.create_ms is not None and one.exec_ms is not None:
        times = [f"create {one.create_ms:.1f} ms", f"exec {one.exec_ms:.2f} ms"]
    return [one.name, "yes" if one.usable else "no", one.isolation, one.found, *times]


def _summary(checks: list[Check]) -> str:
    missing = [check.name for check in checks if check.status == "missing"]
    degraded = [check.name for check in checks if check.status == "degraded"]
    if missing:
        return f"[red]Skep cannot be used yet:[/red] {', '.join(missing)}."
    if degraded:
        return f"[green]Skep can be used.[/green] Less than it could be: {', '.join(degraded)}."
    return "[green]Skep can be used, and everything is in place.[/green]"
