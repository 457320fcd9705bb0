"""skep hive: make, list, show, set and delete hives."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.desk import (
    DEFAULT_ACCOUNT,
    Account,
    Confirmed,
    HiveReference,
    actor,
    confirm,
    find_hive,
    open_apiary,
    settle,
    with_program,
)
from skep.cli.terminal import AsJson, examples, print_fields, print_json, print_line, print_table

if TYPE_CHECKING:
    from skep.app.program import Program
    from skep.state.flags import Flags
    from skep.state.hives import Hive
    from skep.state.upkeep import Value

app = typer.Typer(help="Make hives and look after them.", no_args_is_help=True)


def complete_flag(incomplete: str) -> list[str]:
    from skep.state.flags import FLAGS
    from skep.state.upkeep import UPKEEP

    switches = [f"{flag}={value}" for flag in FLAGS for value in ("on", "off")]
    return [choice for choice in (*switches, *(f"{name}=" for name in UPKEEP)) if choice.startswith(incomplete)]


FlagChanges = Annotated[
    list[str],
    typer.Argument(
        help="What to set: a flag, as flag=on or flag=off, or how its computers are kept, as stop_after_s=600.",
        metavar="NAME=VALUE",
        autocompletion=complete_flag,
        show_default=False,
    ),
]


@app.command(
    epilog=examples(
        "skep hive create garden",
        "skep hive create garden --account acme  # in an account of its own",
    )
)
def create(
    name: Annotated[
        str,
        typer.Argument(help="Lower-case letters, digits and hyphens.", metavar="NAME", show_default=False),
    ],
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Make a hive. The account named default is made along with its first hive."""

    async def work(program: Program) -> Hive:
        if account == DEFAULT_ACCOUNT:
            await program.accounts.ensure(account)
        return await program.hives.create(name, account_id=account, actor=actor())

    hive = with_program(work)
    if as_json:
        print_json(_as_json(hive))
    else:
        print_line(f"made hive {hive.name} ({hive.id}) in account {hive.account_id}")


@app.command("list", epilog=examples("skep hive list", "skep hive list --deleted --json"))
def list_(
    account: Annotated[
        str | None, typer.Option("--account", "-a", help="Only the hives of this account.", metavar="ID")
    ] = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="Deleted hives too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List hives."""

    async def work(program: Program) -> tuple[Hive, ...]:
        return await program.hives.list(account_id=account, deleted=deleted)

    hives = with_program(work)
    if as_json:
        print_json([_as_json(hive) for hive in hives])
        return
    rows = [(hive.name, hive.id, hive.account_id, f"{hive.created_at:%Y-%m-%d %H:%M}", _state(hive)) for hive in hives]
    print_table(
        ("NAME", "ID", "ACCOUNT", "CREATED (UTC)", "STATE"),
        rows,
        empty="There are no hives yet. Make one with: skep hive create garden",
    )


@app.command(epilog=examples("skep hive show garden", "skep hive show hv-abcdefghij234567 --json"))
def show(hive: HiveReference, account: Account = DEFAULT_ACCOUNT, as_json: AsJson = False) -> None:
    """Show one hive, with its flags as set and as they are in effect after the roll-out."""

    async def work(program: Program) -> tuple[Hive, Flags]:
        found = await find_hive(program, hive, account, deleted=True)
        return found, await program.rollouts.in_effect(found.flags, found.account_id)

    found, effective = with_program(work)
    if as_json:
        print_json({**_as_json(found), "in_effect": asdict(effective)})
        return
    fields = {"name": found.name, "id": found.id, "account": found.account_id, "state": _state(found)}
    fields["created"] = f"{found.created_at:%Y-%m-%d %H:%M:%S} UTC"
    in_effect = asdict(effective)
    for flag, value in asdict(found.flags).items():
        held_back = " (not rolled out to this account)" if value and not in_effect[flag] else ""
        fields[flag] = _shown(value) + held_back
    fields |= {name: _shown(value) for name, value in asdict(found.upkeep).items()}
    print_fields(fields)


@app.command(
    "set",
    epilog=examples(
        "skep hive set garden skill_authoring_enabled=on self_healing_enabled=off",
        "skep hive set garden threads=thread  # a workspace for each thread",
        "skep hive set garden stop_after_s=600 archive_after_s=3600 delete_after_days=30",
        "skep hive set garden sandbox_mechanism=gvisor sandbox_isolation=kernel  # nothing weaker",
        "skep hive set garden sandbox_mechanism=docker sandbox_fallback=gvisor,bubblewrap",
        "skep hive set garden sandbox_mechanism=default  # what the settings say",
    ),
)
def set_(
    hive: HiveReference, changes: FlagChanges, account: Account = DEFAULT_ACCOUNT, as_json: AsJson = False
) -> None:
    """Set flags of a hive, how its computers are kept, and what isolates them."""
    wanted = dict(map(_parse_change, changes))

    async def work(program: Program) -> Hive:
        return await program.hives.configure(hive, wanted, account_id=account, actor=actor())

    found = with_program(work)
    if as_json:
        print_json(_as_json(found))
    else:
        print_line(f"{found.name}: " + ", ".join(f"{name} {_shown(value)}" for name, value in wanted.items()))


@app.command(epilog=examples("skep hive delete garden", "skep hive delete garden --yes  # in a script"))
def delete(
    hive: HiveReference, account: Account = DEFAULT_ACCOUNT, yes: Confirmed = False, as_json: AsJson = False
) -> None:
    """Delete a hive. Its events and its workspace stay, and can be reached by its id."""
    confirm(f"delete the hive {hive[:60]!a}?", confirmed=yes)

    environment, settings = settle()

    async def work(program: Program) -> tuple[Hive, bool]:
        from skep.app.residence import THREAD, find

        gone = await program.hives.delete(hive, account_id=account, actor=actor())
        apiary = open_apiary(environment, settings)
        return gone, apiary.has((await find(program, apiary, gone.id, account, thread=THREAD)).id)

    gone, has_workspace = with_program(work)
    if as_json:
        print_json(_as_json(gone))
        return
    print_line(f"deleted hive {gone.name}; its events stay: skep events list {gone.id}")
    if has_workspace:
        print_line(f"its workspace stays too, until: skep workspace destroy {gone.id}")


def _parse_change(change: str) -> tuple[str, Value]:
    from skep.errors import InvalidRequest
    from skep.state.upkeep import UPKEEP

    name, _, value = change.partition("=")
    known = {"on": True, "true": True, "off": False, "false": False}
    if value.lower() in known:
        return name, known[value.lower()]
    if name not in UPKEEP or not value:
        raise InvalidRequest(f"{change[:60]!a} does not say what to set", hint="write it as flag=on or flag=off")
    if name.startswith("sandbox_") and value == "default":
        return name, None
    if name == "sandbox_fallback":
        return name, [] if value == "none" else value.split(",")
    return name, int(value) if value.isascii() and value.isdigit() else value


def _as_json(hive: Hive) -> dict[str, object]:
    return {
        "id": hive.id,
        "name": hive.name,
        "account": hive.account_id,
        "flags": asdict(hive.flags),
        "upkeep": asdict(hive.upkeep),
        "created_at": hive.created_at.isoformat(),
        "deleted_at": hive.deleted_at.isoformat() if hive.deleted_at else None,
    }


def _state(hive: Hive) -> str:
    return "deleted" if hive.deleted_at else "active"


def _shown(value: Value | tuple[str, ...]) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case None:
            return "default"
        case list() | tuple():
            return ",".join(value) or "none"
        case _:
            return str(value)
