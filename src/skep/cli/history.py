"""skep workspace checkpoint, rollback and diff: keep states of a workspace, return to them, tell them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.desk import DEFAULT_ACCOUNT, Account, Desk, with_workspace
from skep.cli.terminal import AsJson, examples, print_json, print_line
from skep.cli.workspace import WorkspaceReference

if TYPE_CHECKING:
    from skep.workspace.diff import Diff
    from skep.workspace.manifest import Checkpoint

_COLOURS = {"+": "green", "-": "red", "~": "yellow", ">": "cyan"}

app = typer.Typer()


@app.command(
    epilog=examples(
        "skep workspace checkpoint garden --name before-the-upgrade",
        "skep workspace checkpoint garden --note 'all tests pass'",
        "skep workspace show garden  # lists the checkpoints",
    )
)
def checkpoint(
    workspace: WorkspaceReference,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="What to call it, besides its id.", show_default=False)
    ] = None,
    note: Annotated[str, typer.Option("--note", help="What to remember about it.", show_default=False)] = "",
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Keep the present state of a workspace, to return to it later. What runs in it goes on."""
    from skep.state.events import Checkpointed

    async def work(desk: Desk) -> Checkpoint:
        made = await desk.apiary.at(desk.id).checkpoint(desk.id, name, note=note)
        await desk.record(Checkpointed(checkpoint=made.id, name=made.name, note=made.note))
        return made

    made = with_workspace(workspace, account, work)
    if as_json:
        print_json(_as_json(made))
        return
    print_line(f"kept checkpoint {made.title} of {workspace}")
    print_line(f"return to it with: skep workspace rollback {workspace} {made.id}")


@app.command(
    epilog=examples(
        "skep workspace rollback garden before-the-upgrade",
        "skep workspace rollback garden c0003  # by its id",
    )
)
def rollback(
    workspace: WorkspaceReference,
    to: Annotated[str, typer.Argument(help="Id or name of the checkpoint.", metavar="CHECKPOINT", show_default=False)],
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Return a workspace to a checkpoint. What runs in it is ended; what it held by now becomes a checkpoint itself."""
    from skep.state.events import RolledBack

    async def work(desk: Desk) -> tuple[Checkpoint, Checkpoint]:
        target = desk.apiary.workspaces.show(desk.id).checkpoint(to)
        left = await desk.apiary.at(desk.id).rollback(desk.id, target.id)
        await desk.record(RolledBack(checkpoint=target.id, left=left.id))
        return target, left

    target, left = with_workspace(workspace, account, work)
    if as_json:
        print_json({"checkpoint": _as_json(target), "left": _as_json(left)})
        return
    print_line(f"{workspace} is back at checkpoint {target.title}")
    print_line(f"undo it with: skep workspace rollback {workspace} {left.id}")


@app.command(
    epilog=examples(
        "skep workspace diff garden  # all that has changed since it was made",
        "skep workspace diff garden c0003  # since a checkpoint",
        "skep workspace diff garden c0003 c0007  # between two",
    )
)
def diff(
    workspace: WorkspaceReference,
    older: Annotated[
        str,
        typer.Argument(
            help="Checkpoint by id or name; without it what the workspace was in the beginning.", metavar="OLDER"
        ),
    ] = "start",
    newer: Annotated[
        str | None,
        typer.Argument(help="Checkpoint by id or name; without it the present.", metavar="NEWER", show_default=False),
    ] = None,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Tell what has changed in a workspace: files with their lines, and packages."""

    async def work(desk: Desk) -> Diff:
        return await desk.apiary.at(desk.id).diff(desk.id, older, newer)

    found = with_workspace(workspace, account, work)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        _print(found.text())


def _print(text: str) -> None:
    """Print a diff line by line; on a terminal in colours."""
    import sys

    if not sys.stdout.isatty():
        for line in text.splitlines():
            print_line(line)
        return
    from rich.text import Text

    from skep.cli.terminal import console, printable

    screen = console()
    for line in text.splitlines():
        screen.print(Text(printable(line), _COLOURS.get(line.strip()[:1], "")), soft_wrap=True)


def _as_json(checkpoint: Checkpoint) -> dict[str, object]:
    return checkpoint.model_dump(mode="json", exclude={"state"})
