"""skep state: the database."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.desk import settle, with_program
from skep.cli.terminal import AsJson, examples, print_fields, print_json, print_line, progress

if TYPE_CHECKING:
    from skep.app.program import Program
    from skep.state.archive import Manifest

app = typer.Typer(help="Look after the database.", no_args_is_help=True)

NewFile = Annotated[Path, typer.Argument(help="The backup to write.", metavar="FILE", show_default=False)]
BackupFile = Annotated[
    Path,
    typer.Argument(help="The backup to read.", metavar="FILE", show_default=False, exists=True, dir_okay=False),
]


def _url() -> str:
    from skep.app.program import state_url

    environment, settings = settle()
    return state_url(environment.paths, settings)


@app.command(epilog=examples("skep state migrate  # after installing a newer Skep"))
def migrate(as_json: AsJson = False) -> None:
    """Bring the database to this program's schema, creating it if need be."""
    from skep.state import database

    before = asyncio.run(database.migrate(_url()))
    if as_json:
        print_json({"place": before.place, "from": before.revision, "to": before.head})
    elif before.current:
        print_line(f"{before.place} has schema {before.head} already")
    else:
        print_line(f"{before.place}: schema {before.revision or 'none'} -> {before.head}")


@app.command(epilog=examples("skep state status", "skep state status --json"))
def status(as_json: AsJson = False) -> None:
    """Say where the database is and which schema it has; change nothing."""
    from skep.state import database

    found = asyncio.run(database.status(_url()))
    if as_json:
        print_json({**asdict(found), "current": found.current})
        return
    schema = found.revision or "none, the first command creates it"
    print_fields(
        {
            "database": found.place,
            "kind": found.dialect,
            "schema": schema if found.current or not found.revision else f"{schema}, {found.head} is needed",
        }
    )


@app.command(epilog=examples("skep state backup skep-$(date +%F).zip", "skep state backup /mnt/usb/skep.zip --json"))
def backup(file: NewFile, as_json: AsJson = False) -> None:
    """Write the whole database, as it is at one moment, to a new file. Work may go on meanwhile."""

    async def work(program: Program) -> Manifest:
        from skep.state.backup import backup as write

        with progress("backing up") as bar:
            return await write(program.database, file, progress=bar.at)

    manifest = with_program(work)
    if as_json:
        print_json(_manifest(file, manifest))
    else:
        print_line(f"wrote {manifest.rows:,} rows to {file}; keep a copy of the keys folder with it")


@app.command(epilog=examples("skep state restore skep-2026-01-31.zip  # into an empty or absent database"))
def restore(file: BackupFile, as_json: AsJson = False) -> None:
    """Fill the empty or absent database from a backup, all of it or nothing, then verify its events."""
    from skep.state.backup import restore as fill

    with progress("restoring") as bar:
        manifest = asyncio.run(fill(_url(), file, progress=bar.at))
    with_program(_verify_restored)
    if as_json:
        print_json(_manifest(file, manifest))
    else:
        print_line(f"restored {manifest.rows:,} rows, written at {manifest.created_at}")


async def _verify_restored(program: Program) -> None:
    from skep.errors import ChainBroken
    from skep.state.chain import total, verify

    with progress("verifying", await total(program.database)) as bar:
        verdict = await verify(program.database, signer=program.signer, progress=bar.add)
    if verdict.first_bad is None:
        return
    fault, folder = verdict.first_bad, program.signer.anchors.folder
    raise ChainBroken(
        f"everything was restored, but record {fault.seq} of {fault.hive_id}: {fault.reason}",
        hint=f"if the backup is meant to be older than what was signed: mv {folder} {folder}.before-restore",
    )


def _manifest(file: Path, manifest: Manifest) -> dict[str, object]:
    return {"file": str(file), **manifest.model_dump(mode="json")}
