"""skep rollout: how many accounts each flag takes effect for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.desk import with_program
from skep.cli.terminal import AsJson, examples, print_json, print_line, print_table

if TYPE_CHECKING:
    from skep.app.program import Program

app = typer.Typer(help="Roll flags out to a share of the accounts.", no_args_is_help=True)


def complete_flag(incomplete: str) -> list[str]:
    from skep.state.flags import FLAGS

    return [flag for flag in FLAGS if flag.startswith(incomplete)]


@app.command("list", epilog=examples("skep rollout list"))
def list_(as_json: AsJson = False) -> None:
    """List the flags with the share of accounts that each is rolled out to."""

    async def work(program: Program) -> dict[str, int]:
        return await program.rollouts.percents()

    percents = with_program(work)
    if as_json:
        print_json(percents)
    else:
        rows = [(flag, f"{percent} %") for flag, percent in percents.items()]
        print_table(("FLAG", "ACCOUNTS"), rows, empty="There are no flags.")


@app.command(
    "set",
    epilog=examples(
        "skep rollout set skill_authoring_enabled 10  # for a tenth of the accounts",
        "skep rollout set skill_authoring_enabled 0  # for nobody",
    ),
)
def set_(
    flag: Annotated[
        str,
        typer.Argument(help="Name of the flag.", autocompletion=complete_flag, metavar="FLAG", show_default=False),
    ],
    percent: Annotated[int, typer.Argument(help="0 to 100.", metavar="PERCENT", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Roll a flag out to a share of the accounts; a larger share keeps every account of a smaller one."""

    async def work(program: Program) -> None:
        await program.rollouts.set(flag, percent)

    with_program(work)
    if as_json:
        print_json({"flag": flag, "percent": percent})
    else:
        print_line(f"{flag}: {percent} % of the accounts")
