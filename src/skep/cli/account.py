"""skep account: make, list, show and delete accounts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.desk import Confirmed, complete_account, confirm, with_program
from skep.cli.terminal import AsJson, examples, print_fields, print_json, print_line, print_table

if TYPE_CHECKING:
    from skep.app.program import Program
    from skep.state.accounts import Account
    from skep.state.hives import Hive

app = typer.Typer(help="Make accounts, the owners of hives.", no_args_is_help=True)

AccountId = Annotated[
    str,
    typer.Argument(help="Id of the account.", autocompletion=complete_account, metavar="ID", show_default=False),
]


@app.command(epilog=examples("skep account create acme"))
def create(account_id: AccountId, as_json: AsJson = False) -> None:
    """Make an account."""

    async def work(program: Program) -> Account:
        return await program.accounts.create(account_id)

    account = with_program(work)
    if as_json:
        print_json(_as_json(account))
    else:
        print_line(f"made account {account.id}")


@app.command("list", epilog=examples("skep account list", "skep account list --json | jq -r '.[].id'"))
def list_(as_json: AsJson = False) -> None:
    """List accounts."""

    async def work(program: Program) -> tuple[Account, ...]:
        return await program.accounts.list()

    accounts = with_program(work)
    if as_json:
        print_json([_as_json(account) for account in accounts])
        return
    print_table(
        ("ID", "CREATED (UTC)"),
        [(account.id, f"{account.created_at:%Y-%m-%d %H:%M}") for account in accounts],
        empty="There are no accounts yet. Make one with: skep account create acme",
    )


@app.command(epilog=examples("skep account show acme"))
def show(account_id: AccountId, as_json: AsJson = False) -> None:
    """Show an account and its hives."""

    async def work(program: Program) -> tuple[Account, tuple[Hive, ...]]:
        return await program.accounts.show(account_id), await program.hives.list(account_id=account_id)

    account, hives = with_program(work)
    names = [hive.name for hive in hives]
    if as_json:
        print_json({**_as_json(account), "hives": names})
        return
    print_fields(
        {
            "id": account.id,
            "created": f"{account.created_at:%Y-%m-%d %H:%M:%S} UTC",
            "hives": ", ".join(names) or "none",
        }
    )


@app.command(epilog=examples("skep account token acme", "skep account token acme --renew  # the old one is void"))
def token(
    account_id: AccountId,
    renew: Annotated[bool, typer.Option("--renew", help="Make another; the old one opens nothing any more.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the token with which programs ask a server for this account (see: skep serve)."""
    from skep.gateway.tokens import MAIN, Tokens

    async def work(program: Program) -> str:
        if account_id == MAIN:
            await program.accounts.ensure(MAIN)
        await program.accounts.show(account_id)
        tokens = Tokens(program.paths.home / "keys")
        return tokens.renew(account_id) if renew else tokens.of(account_id)

    found = with_program(work)
    if as_json:
        print_json({"account": account_id, "token": found})
    else:
        print_line(found)


@app.command(epilog=examples("skep account delete acme --yes"))
def delete(account_id: AccountId, yes: Confirmed = False, as_json: AsJson = False) -> None:
    """Delete an account that has no hives left."""
    confirm(f"delete the account {account_id[:60]!a}?", confirmed=yes)

    async def work(program: Program) -> None:
        await program.accounts.delete(account_id)

    with_program(work)
    if as_json:
        print_json({"id": account_id, "deleted": True})
    else:
        print_line(f"deleted account {account_id}")


def _as_json(account: Account) -> dict[str, str]:
    return {"id": account.id, "created_at": account.created_at.isoformat()}
