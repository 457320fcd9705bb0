"""skep workspace archive and restore: put workspaces away, and bring them back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.desk import DEFAULT_ACCOUNT, Account, Desk, open_apiary, settle, with_workspace
from skep.cli.terminal import AsJson, examples, print_json, print_line, print_table, progress
from skep.cli.workspace import OptionalReference, WorkspaceReference, moving, spell_size

if TYPE_CHECKING:
    from skep.workspace.archive.archive import Restored, Saved
    from skep.workspace.manifest import Manifest

app = typer.Typer()


@app.command(
    epilog=examples(
        "skep workspace archive garden  # only what has changed since the last time is stored",
        "skep workspace archive --list  # which archives there are",
    )
)
def archive(
    workspace: OptionalReference = None,
    list_: Annotated[bool, typer.Option("--list", help="List archives, of all workspaces or of this one.")] = False,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Save a workspace, encrypted, to the store of archives (workspace.archive_url in the settings)."""
    from skep.errors import InvalidRequest

    if list_:
        _list(workspace, account, as_json=as_json)
        return
    if workspace is None:
        raise InvalidRequest("no workspace is named", hint="skep workspace archive garden")

    async def work(desk: Desk) -> Saved:
        from skep.state.events import WorkspaceArchived

        with progress("archiving") as bar:
            saved = await desk.apiary.put_away(desk.id, on_progress=moving(bar))
        await desk.record(WorkspaceArchived(archive=saved.version))
        return saved

    saved = with_workspace(workspace, account, work)
    if as_json:
        from dataclasses import asdict

        print_json(asdict(saved))
        return
    print_line(f"archived {workspace} as {saved.version}")
    print_line(f"{saved.files:,} files, {spell_size(saved.size_bytes)}; newly stored: {spell_size(saved.stored_bytes)}")
    if saved.left_out:
        print_line(f"{saved.left_out} devices were left out")
    print_line(f"bring it back with: skep workspace restore {workspace}")


def _list(workspace: str | None, account: str, *, as_json: bool) -> None:
    environment, settings = settle()
    name = None
    if workspace is not None:

        async def name_of(desk: Desk) -> str:
            return desk.id

        name = with_workspace(workspace, account, name_of)
    found = asyncio.run(open_apiary(environment, settings).archive().list(name))
    if as_json:
        print_json([{"id": one.name, "version": one.version, "saved_at": one.saved_at.isoformat()} for one in found])
        return
    rows = [(one.name, one.version, f"{one.saved_at:%Y-%m-%d %H:%M}") for one in found]
    print_table(("WORKSPACE", "VERSION", "SAVED (UTC)"), rows, empty="There are no archives.")


@app.command(
    epilog=examples(
        "skep workspace restore garden  # after it was destroyed, or on another machine",
        "skep workspace restore garden --as garden-of-may --version 00000003-20260501T080000Z-1f2e3d4c",
    )
)
def restore(
    workspace: WorkspaceReference,
    version: Annotated[
        str | None, typer.Option("--version", help="Which archive; without it the newest.", show_default=False)
    ] = None,
    as_: Annotated[
        str | None,
        typer.Option("--as", help="Id for the workspace; without it the one it had.", metavar="ID", show_default=False),
    ] = None,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Bring a workspace back from an archive. All of it is verified first; nothing that is there is replaced."""

    async def work(desk: Desk) -> tuple[Manifest, Restored]:
        from skep.app.residence import keep_apart
        from skep.state.events import WorkspaceRestored

        if as_ is not None:
            await keep_apart(desk.program, [as_], account)
        else:
            await desk.begin_session()
        with progress("restoring") as bar:
            made, restored = await desk.apiary.bring_back(
                await _name(desk),
                version=version,
                workspace_id=as_ or desk.id,
                labels=desk.residence.labels if as_ is None else {},
                shown=desk.shown() if as_ is None else (),
                on_progress=moving(bar),
            )
        if as_ is None:
            await desk.record(WorkspaceRestored(archive=restored.version))
        return made, restored

    made, restored = with_workspace(workspace, account, work)
    if as_json:
        print_json({**made.model_dump(mode="json"), "archive": restored.version})
        return
    print_line(f"restored workspace {made.id} from {restored.version}, saved {restored.saved_at:%Y-%m-%d %H:%M} UTC")
    print_line(f"{restored.files:,} files, {spell_size(restored.size_bytes)}")
    print_line(f"next: skep exec --hive {as_ or workspace} -- ls")


async def _name(desk: Desk) -> str:
    """Return under which id a workspace was archived: one from before there were sessions under that of its hive."""
    archive, hive = desk.apiary.archive(), desk.residence.hive
    if hive is not None and not await archive.list(desk.id) and await archive.list(hive.id):
        return hive.id
    return desk.id
