"""skep template build, versions, rollback and gc: the built environments that workspaces start from."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skep.cli.desk import open_apiary, settle
from skep.cli.template import TemplateName, complete_template, template_app
from skep.cli.terminal import AsJson, console, examples, print_json, print_line, print_table, printable

if TYPE_CHECKING:
    from skep.app.apiary import Apiary
    from skep.workspace.snapshot.snapshot import Snapshot

_MB = 1_000_000
#: The commands on templates themselves, and these.
app = template_app


def complete_version(context: typer.Context, incomplete: str) -> list[str]:
    from skep.errors import SkepError

    try:
        found = _apiary().snapshots.versions(context.params.get("name") or "")
    except SkepError:  # completion has no place to show an error
        return []
    return [one.version for one in found if one.version.startswith(incomplete)]


Version = Annotated[
    str, typer.Argument(help="The version.", autocompletion=complete_version, metavar="VERSION", show_default=False)
]


@app.command(
    epilog=examples(
        "skep template build default",
        "skep template build default --fresh  # again, though nothing has changed",
    )
)
def build(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Names of the templates.", autocompletion=complete_template, metavar="TEMPLATE...", show_default=False
        ),
    ],
    fresh: Annotated[bool, typer.Option("--fresh", help="Build it though a version holds the same already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build templates with the newest packages that they allow; new workspaces start from what is built.

    A build that fails changes nothing, and says which package it was.
    """
    import asyncio

    snapshots = _apiary().snapshots
    built: list[dict[str, Any]] = []
    for name in names:
        began = time.time()
        with _steps(name) as tell:
            made = asyncio.run(snapshots.build(name, on_progress=tell, fresh=fresh))
        is_new = made.built_at.timestamp() >= began
        built.append({**_as_json(made), "new": is_new})
        if not as_json:
            done = f"built in {time.time() - began:.1f} s" if is_new else "up to date"
            print_line(f"{name} {made.version}: {done}; {_content(made)}")
    if as_json:
        print_json(built)


@app.command(epilog=examples("skep template versions default", "skep template versions default --json"))
def versions(name: TemplateName, as_json: AsJson = False) -> None:
    """List the built versions of a template, the newest last."""
    from skep.errors import NotFound

    apiary = _apiary()
    found = apiary.snapshots.versions(name)
    if not found:
        apiary.templates.show(name)  # says so if there is no such template
    try:
        latest = apiary.snapshots.latest(name)
    except NotFound:
        latest = None
    if as_json:
        print_json([{**_as_json(one), "latest": one == latest} for one in found])
        return
    rows = [
        (one.version, f"{one.built_at:%Y-%m-%d %H:%M}", one.python or "", one.node or "", _packages(one), _size(one),
         "latest" if one == latest else "")
        for one in found
    ]  # fmt: skip
    columns = ("VERSION", "BUILT (UTC)", "PYTHON", "NODE", "PACKAGES", "SIZE", "")
    print_table(columns, rows, empty=f"{name} has not been built yet. Build it with: skep template build {name}")
    if latest and latest.recipe != _recipe(apiary, name):
        console(stderr=True).print(f"[dim]The template has changed since. Build it: skep template build {name}[/dim]")


@app.command(epilog=examples("skep template rollback default v0002-3f9a1c5e7b20"))
def rollback(name: TemplateName, version: Version, as_json: AsJson = False) -> None:
    """Let new workspaces start from another version of a template. Workspaces that exist keep theirs."""
    now = _apiary().snapshots.rollback(name, version)
    if as_json:
        print_json(_as_json(now))
    else:
        print_line(f"{name}: the latest version is now {now.version}, built {now.built_at:%Y-%m-%d %H:%M} UTC")


@app.command(epilog=examples("skep template gc", "skep template gc --json"))
def gc(as_json: AsJson = False) -> None:
    """Remove built versions that are neither the latest nor used by a workspace, and what killed builds left behind."""
    import asyncio

    apiary = _apiary()
    removed = apiary.snapshots.collect(apiary.workspaces.in_use())
    asyncio.run(apiary.snapshots.cache.prune())
    if as_json:
        print_json([_as_json(one) for one in removed])
        return
    for one in removed:
        print_line(f"removed {one.template} {one.version} ({_size(one)})")
    if not removed:
        print_line("nothing to remove: every version is the latest or in use")


def _apiary() -> Apiary:
    return open_apiary(*settle())


def _recipe(apiary: Apiary, name: str) -> str | None:
    from skep.errors import InvalidRequest

    try:
        return apiary.templates.show(name).recipe_hash()
    except InvalidRequest:  # it is gone or wrong by now; `skep template check` says so
        return None


@contextmanager
def _steps(name: str) -> Iterator[Callable[[str], None]]:
    """Show each step of a build as it begins: on a terminal in one line that changes, else a line for each."""
    if not sys.stderr.isatty():

        def write(step: str) -> None:
            sys.stderr.write(f"{name}: {printable(step)}\n")
            sys.stderr.flush()

        yield write
        return
    from rich.markup import escape

    with console(stderr=True).status(f"{name}: starting") as status:
        yield lambda step: status.update(f"{name}: {escape(printable(step))}")


def _content(snapshot: Snapshot) -> str:
    runtimes = [f"Python {snapshot.python}"] if snapshot.python else []
    runtimes += [f"Node {snapshot.node}"] if snapshot.node else []
    return ", ".join([*runtimes, f"{_packages(snapshot)} packages", _size(snapshot), f"{snapshot.files:,} files"])


def _packages(snapshot: Snapshot) -> str:
    return str(len(snapshot.python_packages) + len(snapshot.node_packages))


def _size(snapshot: Snapshot) -> str:
    return f"{snapshot.size_bytes / _MB:.1f} MB"


def _as_json(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "template": snapshot.template,
        "version": snapshot.version,
        "hash": snapshot.hash,
        "folder": str(snapshot.folder),
        "python": snapshot.python,
        "python_packages": dict(snapshot.python_packages),
        "node": snapshot.node,
        "node_packages": dict(snapshot.node_packages),
        "built_at": snapshot.built_at.isoformat(),
        "size_bytes": snapshot.size_bytes,
        "files": snapshot.files,
    }
