from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any

import pytest
from sqlalchemy import insert

from skep.errors import Conflict, InvalidRequest, NotFound
from skep.state.accounts import Accounts, require_account
from skep.state.database import Database
from skep.state.events import HiveConfigured, HiveCreated, HiveDeleted
from skep.state.flags import Flags
from skep.state.hives import Hives
from skep.state.log import EventLog
from skep.state.names import is_hive_id
from skep.state.schema import hives as hive_rows
from skep.state.upkeep import USUAL, Upkeep

UntilWaiting = Callable[[asyncio.Task[Any]], Awaitable[None]]

ODD = ["", "../etc", "a/b", "a\0b", "a" * 64, "a" * 10_000, "\u202eevil", "שלום", "A", "-a", "a b", "a\n", "a_b"]


@pytest.fixture
async def log(database: Database) -> AsyncIterator[EventLog]:
    log = EventLog(database)
    yield log
    await log.close()


@pytest.fixture
async def accounts(database: Database) -> Accounts:
    accounts = Accounts(database)
    await accounts.create("bees")
    await accounts.create("wasps")
    return accounts


@pytest.fixture
def hives(database: Database, log: EventLog, accounts: Accounts) -> Hives:
    return Hives(database, log)


async def _happened(log: EventLog, hive_id: str) -> list[object]:
    return [recorded.event for recorded in await log.page(hive_id)]


# --- accounts


async def test_accounts_are_listed_by_id(accounts: Accounts) -> None:
    for name in ("b-2", "b", "b1", "0"):
        await accounts.create(name)
    assert [account.id for account in await accounts.list()] == ["0", "b", "b-2", "b1", "bees", "wasps"]


async def test_an_account_reads_back_as_it_was_made(accounts: Accounts) -> None:
    made = await accounts.create("new")
    assert await accounts.show("new") == made
    assert await accounts.ensure("new") == made


async def test_an_account_is_made_once(accounts: Accounts) -> None:
    with pytest.raises(Conflict, match="bees"):
        await accounts.create("bees")
    outcomes = await asyncio.gather(*(accounts.create("ants") for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 7


async def test_an_account_with_hives_cannot_be_deleted(accounts: Accounts, hives: Hives) -> None:
    hive = await hives.create("home", account_id="bees", actor="me")
    with pytest.raises(Conflict, match="still has hives"):
        await accounts.delete("bees")
    assert await accounts.show("bees")
    await hives.delete(hive.id, account_id="bees", actor="me")
    await accounts.delete("bees")
    with pytest.raises(NotFound):
        await accounts.show("bees")
    assert [account.id for account in await accounts.list()] == ["wasps"]


async def test_an_account_cannot_be_deleted_under_a_hive_that_is_being_made(
    database: Database, accounts: Accounts, until_waiting: UntilWaiting
) -> None:
    async with database.write() as connection:
        await require_account(connection, "bees", lock=True)
        deletion = asyncio.create_task(accounts.delete("bees"))
        await until_waiting(deletion)
        row = {"id": "hv-x", "account_id": "bees", "name": "home", "created_at": "2026-01-01T00:00:00.000000Z"}
        await connection.execute(insert(hive_rows), row | asdict(Flags()))
    with pytest.raises(Conflict, match="still has hives"):
        await deletion


async def test_the_id_of_a_deleted_account_is_not_given_again(accounts: Accounts) -> None:
    await accounts.delete("bees")
    with pytest.raises(Conflict, match="existed once"):
        await accounts.create("bees")
    with pytest.raises(NotFound):
        await accounts.ensure("bees")
    with pytest.raises(NotFound):
        await accounts.delete("bees")


async def test_a_deleted_account_gets_no_hives(accounts: Accounts, hives: Hives) -> None:
    await accounts.delete("bees")
    with pytest.raises(NotFound, match="no account 'bees'"):
        await hives.create("home", account_id="bees", actor="me")


@pytest.mark.parametrize("name", ODD)
async def test_odd_account_ids_are_refused_and_shown_safely(accounts: Accounts, name: str) -> None:
    for attempt in (accounts.create(name), accounts.show(name), accounts.delete(name), accounts.ensure(name)):
        await _refused(attempt)
    assert len(await accounts.list()) == 2


async def _refused(attempt: Awaitable[object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await attempt
    assert caught.value.message.isascii() and caught.value.message.isprintable()
    assert len(caught.value.message) < 200 and caught.value.hint


# --- hives


async def test_a_hive_reads_back_as_it_was_made_by_id_and_by_name(hives: Hives, log: EventLog) -> None:
    made = await hives.create("home", account_id="bees", actor="me")
    assert is_hive_id(made.id) and made.flags == Flags(skill_authoring_enabled=False)
    assert await hives.show(made.id, account_id="bees") == made
    assert await hives.show("home", account_id="bees") == made
    assert await _happened(log, made.id) == [HiveCreated(name="home")]


async def test_flags_given_at_the_start_are_kept_and_on_record(hives: Hives, log: EventLog) -> None:
    flags = Flags(sandbox_enabled=False, skill_authoring_enabled=True)
    made = await hives.create("home", account_id="bees", actor="me", flags=flags)
    assert (await hives.show("home", account_id="bees")).flags == flags
    changes = {"sandbox_enabled": False, "skill_authoring_enabled": True}
    assert await _happened(log, made.id) == [HiveCreated(name="home"), HiveConfigured(changes=changes)]


async def test_configuring_changes_what_is_named_and_records_what_changed(hives: Hives, log: EventLog) -> None:
    made = await hives.create("home", account_id="bees", actor="me")
    changes = {"sandbox_enabled": True, "self_healing_enabled": False}
    hive = await hives.configure("home", changes, account_id="bees", actor="you")
    assert hive == await hives.show("home", account_id="bees")
    assert hive.flags == Flags(self_healing_enabled=False)
    (_, last) = await log.page(made.id)
    assert (last.actor, last.account_id) == ("you", "bees")
    assert last.event == HiveConfigured(changes={"self_healing_enabled": False})


async def test_configuring_nothing_new_records_nothing(hives: Hives, log: EventLog) -> None:
    made = await hives.create("home", account_id="bees", actor="me")
    assert await hives.configure("home", {"sandbox_enabled": True}, account_id="bees", actor="me") == made
    assert len(await log.page(made.id)) == 1


@pytest.mark.parametrize("changes", [{"name": True}, {"sandbox_enabled": "yes"}, {"sandbox_enabled": 1}, {"": False}])
async def test_what_is_no_flag_or_no_bool_is_refused(hives: Hives, log: EventLog, changes: dict[str, bool]) -> None:
    made = await hives.create("home", account_id="bees", actor="me")
    await _refused(hives.configure("home", changes, account_id="bees", actor="me"))
    assert await hives.show("home", account_id="bees") == made
    assert len(await log.page(made.id)) == 1


async def test_a_deleted_hive_is_gone_but_its_events_stay(hives: Hives, log: EventLog) -> None:
    made = await hives.create("home", account_id="bees", actor="me")
    deleted = await hives.delete("home", account_id="bees", actor="me")
    assert deleted.id == made.id and deleted.deleted_at
    for reference in ("home", made.id):
        with pytest.raises(NotFound):
            await hives.show(reference, account_id="bees")
        with pytest.raises(NotFound):
            await hives.delete(reference, account_id="bees", actor="me")
    assert await hives.list(account_id="bees") == ()
    assert await hives.list(account_id="bees", deleted=True) == (deleted,)
    assert await hives.show(made.id, account_id="bees", deleted=True) == deleted
    assert await _happened(log, made.id) == [HiveCreated(name="home"), HiveDeleted(name="home")]


async def test_the_name_of_a_deleted_hive_is_free_again(hives: Hives) -> None:
    first = await hives.create("home", account_id="bees", actor="me")
    await hives.delete("home", account_id="bees", actor="me")
    second = await hives.create("home", account_id="bees", actor="me")
    assert second.id != first.id
    assert await hives.show("home", account_id="bees", deleted=True) == second


async def test_a_name_is_taken_once_per_account(hives: Hives) -> None:
    await hives.create("home", account_id="bees", actor="me")
    with pytest.raises(Conflict, match="has a hive home already"):
        await hives.create("home", account_id="bees", actor="me")
    assert await hives.create("home", account_id="wasps", actor="me")


async def test_of_many_at_once_one_gets_the_name(hives: Hives) -> None:
    tries = (hives.create("home", account_id="bees", actor="me") for _ in range(8))
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 7
    assert len(await hives.list(account_id="bees")) == 1


async def test_nothing_crosses_an_account(hives: Hives) -> None:
    made = await hives.create("home", account_id="bees", actor="me")
    for reference in ("home", made.id):
        with pytest.raises(NotFound):
            await hives.show(reference, account_id="wasps", deleted=True)
        with pytest.raises(NotFound):
            await hives.configure(reference, {"sandbox_enabled": False}, account_id="wasps", actor="me")
        with pytest.raises(NotFound):
            await hives.delete(reference, account_id="wasps", actor="me")
    assert await hives.list(account_id="wasps") == ()
    assert await hives.show("home", account_id="bees") == made


async def test_hives_are_listed_by_account_and_name(hives: Hives) -> None:
    for account, name in (("wasps", "a"), ("bees", "c"), ("bees", "b-1"), ("bees", "b")):
        await hives.create(name, account_id=account, actor="me")
    listed = [(hive.account_id, hive.name) for hive in await hives.list()]
    assert listed == [("bees", "b"), ("bees", "b-1"), ("bees", "c"), ("wasps", "a")]


@pytest.mark.parametrize("name", [*ODD, "hv-abcdefghij234567"])
async def test_odd_hive_names_are_refused_and_leave_nothing(hives: Hives, name: str) -> None:
    await _refused(hives.create(name, account_id="bees", actor="me"))
    assert await hives.list(deleted=True) == ()


@pytest.mark.parametrize("name", ODD)
async def test_odd_references_are_refused_and_shown_safely(hives: Hives, name: str) -> None:
    await _refused(hives.show(name, account_id="bees"))
    await _refused(hives.show("home", account_id=name))
    await _refused(hives.create("home", account_id=name, actor="me"))
    await _refused(hives.list(account_id=name))


async def test_an_act_that_cannot_be_recorded_does_not_happen(hives: Hives, log: EventLog) -> None:
    made = await hives.create("home", account_id="bees", actor="me")
    await _refused(hives.create("other", account_id="bees", actor="\0"))
    await _refused(hives.delete("home", account_id="bees", actor=""))
    assert await hives.list(deleted=True) == (made,)


async def test_a_hive_keeps_what_it_has_chosen_and_the_log_says_so(hives: Hives, log: EventLog) -> None:
    made = await hives.create("home", account_id="bees", actor="me")
    assert made.upkeep == USUAL
    changes = {"threads": "thread", "stop_after_s": 60, "sandbox_enabled": True}
    await hives.configure("home", changes, account_id="bees", actor="me")
    assert (await hives.show("home", account_id="bees")).upkeep == Upkeep(threads="thread", stop_after_s=60)
    *_, last = await log.page(made.id)
    assert last.event == HiveConfigured(changes={"threads": "thread", "stop_after_s": 60})
