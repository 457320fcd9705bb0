"""The tree of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from skep.cli import (
    account,
    archive,
    ask,
    config,
    delivery,
    demo,
    doctor,
    events,
    files,
    healing,
    history,
    hive,
    python,
    rollout,
    sandbox,
    serve,
    session,
    snapshot,
    state,
    task,
    upkeep,
    workspace,
)
from skep.cli.terminal import examples

app = typer.Typer(
    name="skep",
    help="Skep, a home for AI agents: a private computer that survives, a memory a person can read, "
    "healing, and skills.",
    epilog=examples(
        "skep demo  # see it work, in a throwaway folder",
        "skep doctor  # check this machine",
        "skep hive create garden  # make a hive",
        "skep run 'Sum up report.csv' --hive garden  # ask it for something",
        "skep exec --hive garden -- ls -la  # run a command in its workspace",
        "skep events tail garden  # watch what happens in it",
        "skep --install-completion  # complete commands with the tab key",
    ),
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from skep import __version__

        typer.echo(f"skep {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, and more of the log.")
    ] = False,
) -> None:
    """Take the options that go with every command."""


app.command(epilog=demo.EPILOG)(demo.demo)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.command(epilog=ask.EPILOG)(ask.run)
app.add_typer(task.app, name="task")
app.command(epilog=serve.EPILOG)(serve.serve)
app.command("exec", epilog=sandbox.EXEC_EPILOG)(sandbox.exec_)
app.command(epilog=sandbox.SHELL_EPILOG)(sandbox.shell)
app.command(epilog=python.EPILOG)(python.python)
app.add_typer(files.app, name="files")
app.add_typer(workspace.app, name="workspace")
for more in (history, upkeep, archive):
    workspace.app.registered_commands += more.app.registered_commands
app.add_typer(session.app, name="session")
session.app.registered_commands += delivery.app.registered_commands
app.add_typer(delivery.artifacts, name="artifacts")
app.add_typer(hive.app, name="hive")
hive.app.registered_commands += healing.app.registered_commands
app.add_typer(account.app, name="account")
app.add_typer(snapshot.app, name="template")
app.add_typer(rollout.app, name="rollout")
app.add_typer(events.app, name="events")
app.add_typer(config.app, name="config")
app.add_typer(state.app, name="state")
