"""skep workspace: make workspaces, look at them, copy them, do away with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.desk import (
    DEFAULT_ACCOUNT,
    Account,
    Confirmed,
    Desk,
    complete_workspace,
    confirm,
    open_apiary,
    settle,
    with_program,
    with_workspace,
)
from skep.cli.template import complete_template
from skep.cli.terminal import AsJson, Bar, examples, print_fields, print_json, print_line, print_table, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skep.app.program import Program
    from skep.workspace.archive.watch import Progress
    from skep.workspace.manifest import Checkpoint, Manifest

app = typer.Typer(
    help="Look after workspaces: the files of a hive over the environment of a template.", no_args_is_help=True
)

_REFERENCE = typer.Argument(
    help="Name of the hive whose it is, or id of the workspace.",
    autocompletion=complete_workspace,
    metavar="WORKSPACE",
    show_default=False,
)
WorkspaceReference = Annotated[str, _REFERENCE]
OptionalReference = Annotated[str | None, _REFERENCE]


@app.command("list", epilog=examples("skep workspace list", "skep workspace list --json | jq -r '.[].id'"))
def list_(as_json: AsJson = False) -> None:
    """List all workspaces of this machine, whole or not, with the hives whose they are."""
    environment, settings = settle()

    hives = with_program(_owners)
    found = open_apiary(environment, settings).workspaces.census()
    rows = [_row(manifest, hives) for manifest in found.manifests.values()]
    for state, ids in (("damaged", found.damaged), ("half-made", found.half_made), ("plain folder", found.plain)):
        rows += [(one, hives.get(one, ""), "", "", "", state) for one in ids]
    rows.sort()
    if as_json:
        names_ = ("id", "hive", "template", "snapshot", "checkpoints", "state")
        print_json([dict(zip(names_, row, strict=True)) for row in rows])
        return
    print_table(
        ("ID", "HIVE", "TEMPLATE", "SNAPSHOT", "CHECKPOINTS", "STATE"),
        rows,
        empty="There are no workspaces yet. A hive gets one with its first command: skep exec --hive garden -- ls",
    )


async def _owners(program: Program) -> dict[str, str]:
    """Return the names of hives by the ids of their workspaces; with the key of a thread that has its own."""
    from skep.sessions.key import hive_key, session_id
    from skep.sessions.ledger import Roll

    names = {hive.id: hive for hive in await program.hives.list(deleted=True)}
    owners = {session_id(hive.account_id, hive.id, hive_key(hive.id)): hive.name for hive in names.values()}
    for session in await Roll(program.database).list():
        if session.id not in owners and session.hive_id in names:
            owners[session.id] = f"{names[session.hive_id].name} {session.key}"
    return owners


def _row(manifest: Manifest, hives: dict[str, str]) -> tuple[str, ...]:
    checkpoints, state = str(len(manifest.checkpoints)), "suspended" if manifest.suspended else "ready"
    if manifest.out is not None and is_out(manifest):
        state = f"on {manifest.out.mechanism}"
    version = manifest.snapshot_version or ""
    return (manifest.id, hives.get(manifest.id, ""), manifest.template, version, checkpoints, state)


@app.command(epilog=examples("skep workspace show garden", "skep workspace show garden --json | jq .checkpoints"))
def show(workspace: WorkspaceReference, account: Account = DEFAULT_ACCOUNT, as_json: AsJson = False) -> None:
    """Show one workspace: what it starts from, what it takes, what was installed, and its checkpoints."""

    async def work(desk: Desk) -> tuple[Manifest, int, str | None]:
        from skep.workspace.faults import in_thread

        manifest = desk.apiary.workspaces.show(desk.id)
        size = await in_thread(desk.apiary.weigh, manifest)
        return manifest, size, desk.residence.hive.name if desk.residence.hive else None

    manifest, size, hive = with_workspace(workspace, account, work)
    if as_json:
        print_json({**manifest.model_dump(mode="json"), "hive": hive, "size_bytes": size})
        return
    print_fields(_fields(manifest, size, hive))
    if manifest.checkpoints:
        print_line("")
        print_table(("CHECKPOINT", "NAME", "MADE (UTC)", "NOTE"), _checkpoint_rows(manifest.checkpoints), empty="")


def _fields(manifest: Manifest, size: int, hive: str | None) -> dict[str, str]:
    packages = [*manifest.packages.python, *(f"{name} (node)" for name in manifest.packages.node)]
    return {
        "id": manifest.id,
        "hive": hive or "none",
        "template": f"{manifest.template} {manifest.snapshot_version or '(nothing of it)'}",
        "state": "suspended" if manifest.suspended else "ready",
        "files": _whereabouts(manifest),
        "size": f"{spell_size(size)} of its own, in {_counted(len(manifest.layers) + 1, 'layer')}",
        "installed": ", ".join(packages) or "nothing beyond the template",
        "forked from": manifest.parent or "none",
        "created": f"{manifest.created_at:%Y-%m-%d %H:%M:%S} UTC",
        "shows": ", ".join(shown.inside for shown in manifest.shown) or "no other folders",
    }


def _whereabouts(manifest: Manifest) -> str:
    if manifest.out is None or not is_out(manifest):
        return "here"
    out = manifest.out
    return f"on machine {out.machine} of {out.mechanism}; here they are as of {out.copied_at:%Y-%m-%d %H:%M:%S} UTC"


def is_out(manifest: Manifest) -> bool:
    """Say whether a machine elsewhere has the newest files of a workspace."""
    return manifest.out is not None and manifest.out.stage == "out"


def _checkpoint_rows(checkpoints: Sequence[Checkpoint]) -> list[tuple[str, ...]]:
    return [(one.id, one.name or "", f"{one.created_at:%Y-%m-%d %H:%M}", one.note) for one in checkpoints]


@app.command(
    epilog=examples(
        "skep workspace create garden  # of the hive, from the template in the settings",
        "skep workspace create garden --template data-science",
        "skep workspace create scratch  # nobody's: skep exec --hive scratch -- ls",
    )
)
def create(
    workspace: WorkspaceReference,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            "-t",
            help="What it starts from; without it the template in the settings.",
            autocompletion=complete_template,
            metavar="TEMPLATE",
            show_default=False,
        ),
    ] = None,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Make the workspace of a hive, or one that is nobody's. The template is built first, if it has not been."""
    from skep.errors import Conflict

    async def work(desk: Desk) -> tuple[str, Manifest]:
        if not await desk.settle(template=template):
            raise Conflict(
                f"{desk.residence.title} has a workspace already", hint=f"skep workspace show {desk.residence.title}"
            )
        return desk.residence.title, desk.apiary.workspaces.show(desk.id)

    title, made = with_workspace(workspace, account, work)
    if as_json:
        print_json(made.model_dump(mode="json"))
        return
    print_line(f"made workspace {made.id} from {made.template} {made.snapshot_version}")
    print_line(f"next: skep exec --hive {title} -- ls -la")


@app.command(
    epilog=examples(
        "skep workspace fork garden try-1 try-2 try-3  # three that begin where garden is",
        "skep exec --hive try-1 -- make test  # and go their own ways",
        "skep workspace fork garden spare --with-checkpoints",
    )
)
def fork(
    workspace: WorkspaceReference,
    ids: Annotated[list[str], typer.Argument(help="Ids of the new workspaces.", metavar="ID...", show_default=False)],
    with_checkpoints: Annotated[
        bool, typer.Option("--with-checkpoints", help="Take its checkpoints along; for one new workspace.")
    ] = False,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Make workspaces that begin with all that this one holds, and share it. What runs in it goes on."""
    from skep.app.residence import keep_apart
    from skep.errors import InvalidRequest
    from skep.state.events import WorkspaceForked

    if with_checkpoints and len(ids) > 1:
        raise InvalidRequest("only one workspace can take the checkpoints along", hint="give one id")

    async def work(desk: Desk) -> list[Manifest]:
        workspaces = desk.apiary.at(desk.id)
        await keep_apart(desk.program, ids, account)
        made = [await workspaces.clone(desk.id, ids[0])] if with_checkpoints else await workspaces.fork(desk.id, ids)
        await desk.record(WorkspaceForked(into=tuple(one.id for one in made)))
        return made

    made = with_workspace(workspace, account, work)
    if as_json:
        print_json([one.model_dump(mode="json") for one in made])
        return
    for one in made:
        print_line(f"made workspace {one.id}, which begins with what {workspace} holds now")
    print_line(f"next: skep exec --hive {made[0].id} -- ls")


@app.command(epilog=examples("skep workspace suspend garden  # skep workspace resume garden lets it go on"))
def suspend(workspace: WorkspaceReference, account: Account = DEFAULT_ACCOUNT, as_json: AsJson = False) -> None:
    """End what runs in a workspace, and let nothing start in it until it is resumed."""

    async def work(desk: Desk) -> Manifest:
        return await desk.apiary.at(desk.id).suspend(desk.id)

    done = f"suspended; nothing starts in it until: skep workspace resume {workspace}"
    _say(with_workspace(workspace, account, work), done, as_json)


@app.command(epilog=examples("skep workspace resume garden"))
def resume(workspace: WorkspaceReference, account: Account = DEFAULT_ACCOUNT, as_json: AsJson = False) -> None:
    """Let commands run again in a workspace that was suspended."""

    async def work(desk: Desk) -> Manifest:
        return await desk.apiary.at(desk.id).resume(desk.id)

    _say(with_workspace(workspace, account, work), "resumed", as_json)


@app.command(
    epilog=examples(
        "skep workspace fetch garden",
        "skep workspace fetch garden --abandon  # asks first",
    )
)
def fetch(
    workspace: WorkspaceReference,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Give up what is there, and go on with the older files that are here.")
    ] = False,
    account: Account = DEFAULT_ACCOUNT,
    yes: Confirmed = False,
    as_json: AsJson = False,
) -> None:
    """Bring the files of a workspace home from the machine of a cloud that has them."""
    if abandon:
        confirm(f"give up what a machine elsewhere has of the workspace {workspace[:60]!a}?", confirmed=yes)

    async def work(desk: Desk) -> Manifest:
        from skep.state.events import WorkspaceRepaired

        before = desk.apiary.workspaces.show(desk.id)
        after = await desk.apiary.at(desk.id).fetch(desk.id, abandon=abandon)
        if abandon and is_out(before) and before.out is not None:
            lost = f"everything since {before.out.copied_at:%Y-%m-%d %H:%M:%S} UTC, on machine {before.out.machine}"
            await desk.record(WorkspaceRepaired(done=("went on with the files that are here",), left=(lost,)))
        return after

    done = "goes on with the files that are here" if abandon else "its files are here"
    _say(with_workspace(workspace, account, work), done, as_json)


@app.command(
    epilog=examples(
        "skep workspace destroy garden  # asks first, and archives it first",
        "skep workspace destroy try-1 --no-archive --yes",
    )
)
def destroy(
    workspace: WorkspaceReference,
    no_archive: Annotated[bool, typer.Option("--no-archive", help="Keep nothing of it.")] = False,
    account: Account = DEFAULT_ACCOUNT,
    yes: Confirmed = False,
    as_json: AsJson = False,
) -> None:
    """Remove a workspace with all that is in it; it is archived first, and can be restored from there."""
    from skep.state.events import WorkspaceDestroyed

    kept = "and keep nothing of it" if no_archive else "after it was archived"
    confirm(f"remove the workspace {workspace[:60]!a} {kept}?", confirmed=yes)

    async def work(desk: Desk) -> tuple[str, str | None]:
        with progress("archiving") as bar:
            saved = await desk.apiary.destroy(desk.id, archived=not no_archive, on_progress=moving(bar))
        version = saved.version if saved else None
        await desk.record(WorkspaceDestroyed(archive=version))
        await desk.close_session(version)
        return desk.id, version

    gone, version = with_workspace(workspace, account, work)
    if as_json:
        print_json({"id": gone, "archive": version})
        return
    print_line(f"removed workspace {gone}" + ("" if version else "; nothing of it is kept"))
    if version:
        print_line(f"archived as {version}; bring it back with: skep workspace restore {workspace}")


def spell_size(size: int) -> str:
    """Spell a number of bytes for a person."""
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= least:
            return f"{size / least:,.1f} {unit}"
    return _counted(size, "byte")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def moving(bar: Bar) -> Callable[[Progress], None]:
    """Show how far an archive has come: nobody knows how many files there will be."""
    return lambda now: bar.at(now.files, now.files)


def _say(manifest: Manifest, done: str, as_json: bool) -> None:
    if as_json:
        print_json(manifest.model_dump(mode="json"))
    else:
        print_line(f"workspace {manifest.id}: {done}")
