"""skep doctor: check this machine."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import typer

from skep.cli.terminal import AsJson, console, examples, print_cells, print_json, printable

if TYPE_CHECKING:
    from skep.app.doctor import Check

EPILOG = examples(
    "skep doctor  # exit code 0: usable, 5: something essential is missing",
    "skep doctor --json | jq '.checks[] | select(.status != \"ok\")'",
)
_MARKS = {"ok": "[green]ok[/green]", "degraded": "[yellow]degraded[/yellow]", "missing": "[red]missing[/red]"}


def doctor(as_json: AsJson = False) -> None:
    """Check the kernel, bwrap, the database, models and disk space; say how to put right what is not."""
    from dataclasses import asdict

    from skep.app.doctor import examine, is_usable
    from skep.config import Environment, Settings, load
    from skep.errors import ConfigInvalid, Unavailable

    environment = Environment.read()
    settings: Settings | ConfigInvalid
    try:
        settings = load(environment.paths)
    except ConfigInvalid as error:
        settings = error
    checks = asyncio.run(examine(environment, settings))
    usable = is_usable(checks)
    if as_json:
        print_json({"usable": usable, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks)
    raise typer.Exit(0 if usable else Unavailable.exit_code)


def _print(checks: list[Check]) -> None:
    if not sys.stdout.isatty():
        for check in checks:
            print_cells(check.status, check.name, check.found, *([f"fix: {check.fix}"] if check.fix else []))
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
    screen.print(f"\n{_summary(checks)}")


def _summary(checks: list[Check]) -> str:
    missing = [check.name for check in checks if check.status == "missing"]
    degraded = [check.name for check in checks if check.status == "degraded"]
    if missing:
        return f"[red]Skep cannot be used yet:[/red] {', '.join(missing)}."
    if degraded:
        return f"[green]Skep can be used.[/green] Less than it could be: {', '.join(degraded)}."
    return "[green]Skep can be used, and everything is in place.[/green]"
