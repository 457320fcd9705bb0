"""skep session attach, collect and preview, and skep artifacts: files in and out, and a look at a port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from skep.cli.counter import Counter, with_session
from skep.cli.desk import DEFAULT_ACCOUNT, DEFAULT_THREAD, Account, Thread, actor
from skep.cli.session import SessionReference
from skep.cli.terminal import AsJson, examples, print_json, print_line, print_table
from skep.cli.workspace import spell_size

if TYPE_CHECKING:
    from skep.app.delivery import Delivered, Delivery
    from skep.sessions.artifacts import Collected
    from skep.sessions.attachments import Arrival
    from skep.sessions.computer import Computer

T = TypeVar("T")

app = typer.Typer()
artifacts = typer.Typer(help="Get the files that agents have made for people.", no_args_is_help=True)


@app.command(epilog=examples("skep session attach garden report.pdf data.zip  # a zip is unpacked beside itself"))
def attach(
    session: SessionReference,
    paths: Annotated[list[Path], typer.Argument(help="Files of this machine.", metavar="FILE...", show_default=False)],
    thread: Thread = DEFAULT_THREAD,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Send files to a session, as with a prompt: they are written below /workspace/attachments."""
    from skep.app.delivery import from_disk

    sent = [from_disk(path) for path in paths]

    async def work(delivery: Delivery, computer: Computer) -> Arrival:
        return await delivery.attach(computer, sent)

    arrival = _with_computer(session, account, thread, "attach", work)
    if as_json:
        print_json(asdict(arrival))
    else:
        print_line(arrival.text())
    raise typer.Exit(0 if arrival.arrived else 2)


@app.command(
    epilog=examples("skep session collect garden", "skep session collect garden --json | jq -r '.files[].name'")
)
def collect(
    session: SessionReference,
    thread: Thread = DEFAULT_THREAD,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Collect what is new or has changed in /workspace/output/display, as after a task."""

    async def work(delivery: Delivery, computer: Computer) -> Collected:
        return await delivery.collect(computer)

    found = _with_computer(session, account, thread, "collect", work)
    if as_json:
        skipped = [asdict(one) for one in found.skipped]
        print_json({"files": [asdict(one) for one in found.artifacts], "skipped": skipped})
        return
    rows = [(one.sha256[:12], one.name, one.media_type, spell_size(one.size), one.path) for one in found.artifacts]
    print_table(("HASH", "NAME", "TYPE", "SIZE", "PATH"), rows, empty="Nothing in output/display has changed.")
    for one in found.skipped:
        print_line(f"skipped {one.path}: {one.reason}")


@app.command(
    epilog=examples(
        "skep session preview garden 8000  # Ctrl-C ends it",
        "skep session preview garden 8000 --ttl 60",
    )
)
def preview(
    session: SessionReference,
    port: Annotated[int, typer.Argument(min=1, max=65535, help="Port in the sandbox.", metavar="PORT")],
    ttl: Annotated[float, typer.Option("--ttl", help="Seconds for which the link is good, a day at most.")] = 300.0,
    thread: Thread = DEFAULT_THREAD,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Print a link to a server in the sandbox, and serve it for as long as it is good. It is for whoever has it."""

    async def work(counter: Counter) -> None:
        from skep.app.preview import serving
        from skep.sessions.links import Links

        links = Links.open(counter.program.paths.home / "keys" / "links.key")
        async with (
            counter.computer(account) as computer,
            computer.sandbox("preview") as sandbox,
            serving(sandbox, links, counter.id, port, ttl_s=ttl) as shown,
        ):
            _print_link(shown.link, shown.expires_at, as_json=as_json)
            await asyncio.sleep(max(0.0, shown.expires_at - time.time()))

    with_session(session, account, thread, "preview", work)
    if not as_json:
        print_line("the link has expired; the same command makes another")


def _print_link(link: str, expires_at: float, *, as_json: bool) -> None:
    import sys

    if as_json:
        print_json({"link": link, "expires_at": expires_at})
    else:
        print_line(link)
    sys.stdout.flush()


@artifacts.command("list", epilog=examples("skep artifacts list garden", "skep artifacts list garden --json"))
def list_(
    session: SessionReference,
    thread: Thread = DEFAULT_THREAD,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """List the files that were collected from a session, the oldest first."""

    async def work(counter: Counter) -> list[Delivered]:
        return await _delivery(counter).delivered()

    found = with_session(session, account, thread, "list artifacts", work)
    if as_json:
        print_json([{**asdict(one), "at": one.at.isoformat()} for one in found])
        return
    rows = [
        (one.sha256[:12], one.name, one.media_type, spell_size(one.size), f"{one.at:%Y-%m-%d %H:%M}") for one in found
    ]
    print_table(
        ("HASH", "NAME", "TYPE", "SIZE", "COLLECTED (UTC)"), rows, empty="There are none: skep session collect garden"
    )


@artifacts.command(
    epilog=examples(
        "skep artifacts get garden chart.png  # the newest of that name, into the current folder",
        "skep artifacts get garden 1f2e3d4c - | less  # by its hash, to a pipe",
    )
)
def get(
    session: SessionReference,
    artifact: Annotated[
        str, typer.Argument(help="Name, path, or first digits of the hash.", metavar="ARTIFACT", show_default=False)
    ],
    target: Annotated[
        str | None, typer.Argument(help="Where to put it; - for standard output.", metavar="TARGET", show_default=False)
    ] = None,
    thread: Thread = DEFAULT_THREAD,
    account: Account = DEFAULT_ACCOUNT,
) -> None:
    """Copy a collected file to this machine. What is at the target is replaced."""
    from skep.cli.files import copy_out

    async def work(counter: Counter) -> tuple[str, int]:
        delivery = _delivery(counter)
        found = await delivery.find(artifact)
        return await copy_out(delivery.shelf.get(found.sha256), found.name, target)

    place, size = with_session(session, account, thread, "get an artifact", work)
    if target != "-":
        print_line(f"{artifact} -> {place} ({size:,} bytes)")


def _delivery(counter: Counter) -> Delivery:
    from skep.app.delivery import Delivery

    return Delivery(counter.program, counter.residence.session, actor=actor())


def _with_computer(
    session: str, account: str, thread: str, act: str, work: Callable[[Delivery, Any], Awaitable[T]]
) -> T:
    async def open_and_work(counter: Counter) -> T:
        async with counter.computer(account) as computer:
            return await work(_delivery(counter), computer)

    return with_session(session, account, thread, act, open_and_work)
