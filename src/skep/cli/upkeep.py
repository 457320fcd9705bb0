"""skep workspace health, repair and install: whether a workspace is well, and what its environment holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.desk import DEFAULT_ACCOUNT, Account, Desk, open_apiary, settle, tell, with_program, with_workspace
from skep.cli.terminal import AsJson, examples, print_json, print_line, print_table
from skep.cli.workspace import OptionalReference, WorkspaceReference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skep.app.program import Program
    from skep.workspace.health.finding import Report
    from skep.workspace.health.repair import Repaired
    from skep.workspace.packages.packages import Installed

app = typer.Typer()


@app.command(
    epilog=examples(
        "skep workspace health garden  # exit code 0: well, 6: something is broken",
        "skep workspace health --all --json | jq '.[] | select(.ok | not)'",
        "skep workspace health garden --thorough  # imports every package",
    )
)
def health(
    workspace: OptionalReference = None,
    all_: Annotated[bool, typer.Option("--all", help="Every workspace of this machine.")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="Import every package, which takes seconds.")] = False,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Examine a workspace: whether it is whole, can be mounted, and has what it declares. Nothing is changed."""
    from skep.errors import Corrupt, InvalidRequest

    if (workspace is None) == (not all_):
        raise InvalidRequest("say which workspace to look at", hint="skep workspace health garden, or --all")
    reports = _examine_all(thorough) if workspace is None else [_examine(workspace, account, thorough)]
    if as_json:
        found = [_report_json(report) for report in reports]
        print_json(found if all_ else found[0])
    else:
        _print(reports, brief=all_)
    raise typer.Exit(0 if all(report.ok for report in reports) else Corrupt.exit_code)


def _examine(workspace: str, account: str, thorough: bool) -> Report:
    async def work(desk: Desk) -> Report:
        await desk.let_show()
        return await desk.apiary.examine(desk.id, thorough=thorough)

    return with_workspace(workspace, account, work)


def _examine_all(thorough: bool) -> list[Report]:
    environment, settings = settle()

    async def work(program: Program) -> list[Report]:
        apiary = open_apiary(environment, settings, program)
        return [await apiary.examine(one, thorough=thorough) for one in apiary.ids()]

    return with_program(work)


def _print(reports: list[Report], *, brief: bool) -> None:
    """Print all that was looked at in one workspace, or of several only what is not well."""
    rows = []
    for report in reports:
        shown = report.troubles if brief else report.findings
        rows += [(report.workspace, one.severity, one.code, one.message, one.fix or "") for one in shown]
        if brief and not shown:
            rows.append((report.workspace, "ok", "", "", ""))
    print_table(("WORKSPACE", "IS", "WHAT", "FOUND", "FIX"), rows, empty="There are no workspaces.")


def _report_json(report: Report) -> dict[str, object]:
    return {"id": report.workspace, "ok": report.ok, "findings": [asdict(finding) for finding in report.findings]}


@app.command(epilog=examples("skep workspace repair garden", "skep workspace health garden  # what it would look at"))
def repair(workspace: WorkspaceReference, account: Account = DEFAULT_ACCOUNT, as_json: AsJson = False) -> None:
    """Rebuild what is broken in a workspace from its snapshot and manifest. The agent's own files stay."""
    from skep.errors import Corrupt

    async def work(desk: Desk) -> Repaired:
        from skep.state.events import WorkspaceRepaired

        await desk.let_show()
        found = await desk.apiary.repair(desk.id, tell=tell)
        if found.done:
            left = tuple(finding.message for finding in found.left)
            await desk.record(WorkspaceRepaired(done=found.done, left=left))
        return found

    found = with_workspace(workspace, account, work)
    if as_json:
        print_json({"done": found.done, "left": [asdict(one) for one in found.left], "ok": found.ok})
        raise typer.Exit(0 if found.ok else Corrupt.exit_code)
    for deed in found.done:
        print_line(f"done: {deed}")
    for finding in found.left:
        print_line(f"left ({finding.severity}): {finding.message}" + (f"; try: {finding.fix}" if finding.fix else ""))
    print_line(_outcome(workspace, found))
    raise typer.Exit(0 if found.ok else Corrupt.exit_code)


def _outcome(workspace: str, found: Repaired) -> str:
    if not found.ok:
        return f"{workspace} is still not well"
    return f"{workspace} is well again" if found.done else f"{workspace} needs no repair"


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
