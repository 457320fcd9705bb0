"""skep workspace install: what the environment of a workspace holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.session import DEFAULT_ACCOUNT, Account, Desk, tell, with_workspace
from skep.cli.terminal import AsJson, examples, print_json, print_line
from skep.cli.workspace import WorkspaceReference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skep.workspace.packages import Installed

app = typer.Typer()


@app.command(
    epilog=examples(
        "skep workspace install garden polars 'requests>=2.31'",
        "skep workspace install garden --node axios --node dotenv@^16",
    )
)
def install(
    workspace: WorkspaceReference,
    python: Annotated[
        list[str] | None,
        typer.Argument(help="Python packages, with versions if need be.", metavar="PACKAGE...", show_default=False),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", help="A Node package; may be repeated.", metavar="PACKAGE", show_default=False),
    ] = None,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Install packages into a workspace, for good: they are written down in pyproject.toml and package.json.

    If a package cannot be had, nothing has changed. The workspace itself needs no network for it.
    """
    from skep.state.events import PackagesInstalled

    wanted = {"python": tuple(python or ()), "node": tuple(node or ())}

    async def work(desk: Desk) -> Installed:
        done = await desk.apiary.install(desk.id, **wanted, tell=tell)
        await desk.record(PackagesInstalled(**wanted))
        return done

    done = with_workspace(workspace, account, work)
    if as_json:
        print_json({"python": dict(done.python), "node": dict(done.node), "aside": list(done.aside)})
        return
    changed = [*_versions("python", done.python), *_versions("node", done.node)]
    for line in changed:
        print_line(line)
    for name in done.aside:
        print_line(f"a broken file was kept as {name}")
    named = ", ".join([*wanted["python"], *wanted["node"]])
    print_line(f"{workspace} has {named} now" if changed else f"{workspace} had {named} already")


def _versions(kind: str, changed: Mapping[str, str]) -> list[str]:
    return [f"{kind}\t{name}\t{version}" for name, version in sorted(changed.items())]
