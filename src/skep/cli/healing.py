"""skep hive healing: what failed in a hive, and how often it came through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from skep.cli.desk import DEFAULT_ACCOUNT, Account, HiveReference, find_hive, with_program
from skep.cli.terminal import AsJson, examples, print_json, print_table

if TYPE_CHECKING:
    from skep.app.program import Program
    from skep.healing.counters import Counters

#: A part of `skep hive`.
app = typer.Typer()


@app.command(
    epilog=examples(
        "skep hive healing garden",
        "skep hive healing garden --json | jq .heal_rates  # by kind of failure, from 0 to 1",
    )
)
def healing(hive: HiveReference, account: Account = DEFAULT_ACCOUNT, as_json: AsJson = False) -> None:
    """Count what failed in a hive, by kind, and how many of the tasks that met it succeeded all the same.

    With --json also by tier and by rule. All of it is counted from the log of the hive.
    """

    async def work(program: Program) -> Counters:
        from skep.healing.counters import count_hive

        return await count_hive(program.log, (await find_hive(program, hive, account, deleted=True)).id)

    counters = with_program(work)
    if as_json:
        print_json(_as_json(counters))
        return
    rates = counters.rates()
    rows = [
        (failure, str(met), str(counters.ended[failure]), f"{rates[failure]:.0%}" if failure in rates else "")
        for failure, met in counters.by_failure.most_common()
    ]
    print_table(("FAILURE", "MET", "TASKS", "HEALED"), rows, empty="Nothing has failed here.")


def _as_json(counters: Counters) -> dict[str, object]:
    return {
        "by_tier": {str(tier): number for tier, number in sorted(counters.by_tier.items())},
        "by_rule": dict(sorted(counters.by_rule.items())),
        "by_failure": dict(sorted(counters.by_failure.items())),
        "heal_rates": counters.rates(),
    }
