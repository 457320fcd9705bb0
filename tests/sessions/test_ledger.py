from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.sessions.conftest import Clock, MakeLedger

from skep.errors import Defect, LeaseLost, NotFound
from skep.sessions.controller import Controller, Identity, host_name, owner
from skep.sessions.session import STATUSES, WAYS, Session
from skep.state.database import Database
from skep.state.events import SessionChanged
from skep.state.leases import Leases
from skep.state.log import EventLog


async def happened(log: EventLog, hive_id: str) -> list[tuple[str | None, str]]:
    recorded = await log.page(hive_id, types=["session_changed"])
    return [(one.event.before, one.event.after) for one in recorded if isinstance(one.event, SessionChanged)]


async def test_a_claimed_key_is_on_record_with_its_event(
    make_ledger: MakeLedger, wanted: Session, log: EventLog
) -> None:
    ledger = await make_ledger("here")
    made = await ledger.claim(wanted, reason="first use")
    assert made is not None and (made.token, made.host) == (1, "here")
    assert await ledger.get(wanted.id) == made
    assert await happened(log, wanted.hive_id) == [(None, "creating")]


async def test_a_session_reads_back_as_it_was_written(make_ledger: MakeLedger, wanted: Session, clock: Clock) -> None:
    ledger = await make_ledger("here")
    made = await ledger.claim(wanted, reason="first use")
    assert made is not None
    clock.pass_(seconds=5)
    noted = await ledger.note(made, healthy_at=clock(), rooms={"shell:main": 3}, last_error="a word", generation=7)
    assert await ledger.get(wanted.id) == noted


async def test_of_many_that_claim_one_key_exactly_one_has_it(make_ledger: MakeLedger, wanted: Session) -> None:
    ledgers = [await make_ledger(f"host-{number}") for number in range(8)]
    claims = await asyncio.gather(*(ledger.claim(wanted, reason="race") for ledger in ledgers))
    assert sum(claim is not None for claim in claims) == 1


async def test_a_session_that_was_given_back_can_be_claimed_at_once(make_ledger: MakeLedger, wanted: Session) -> None:
    first, second = await make_ledger("one"), await make_ledger("two")
    mine = await first.claim(wanted, reason="x")
    assert mine is not None and await second.claim(wanted, reason="x") is None
    await first.release(mine)
    taken = await second.claim(wanted, reason="x")
    assert taken is not None and taken.token == mine.token + 1


async def test_who_slept_through_a_take_over_writes_nothing(
    make_ledger: MakeLedger, wanted: Session, log: EventLog
) -> None:
    first, second = await make_ledger("one"), await make_ledger("two")
    mine = await first.claim(wanted, reason="x")
    assert mine is not None
    theirs = await second.claim(await first.release(mine), reason="x")
    assert theirs is not None
    for write in (first.change(mine, "active", reason="late"), first.note(mine, last_error="late")):
        with pytest.raises(LeaseLost):
            await write
    assert await second.get(wanted.id) == theirs
    assert await happened(log, wanted.hive_id) == [(None, "creating")]


async def test_a_controller_that_lost_its_own_lease_writes_nothing(
    make_ledger: MakeLedger, wanted: Session, database: Database
) -> None:
    ledger = await make_ledger("one")
    mine = await ledger.claim(wanted, reason="x")
    assert mine is not None
    await Leases(database).release(ledger._controller.lease)
    with pytest.raises(LeaseLost):
        await ledger.change(mine, "active", reason="late")
    other = await make_ledger("two")
    assert await other.claim(wanted, reason="x") is not None


async def test_a_controller_of_this_machine_that_died_is_not_waited_for(
    make_ledger: MakeLedger, wanted: Session, database: Database
) -> None:
    ledger, other = await make_ledger("here"), await make_ledger("here")
    mine = await ledger.claim(wanted, reason="x")
    assert mine is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        name = f"controller:{replace(ledger._controller.identity, pid=child.pid, started=started)}:00000000"
        await Leases(database).acquire(name, holder="child", ttl_s=600)
        await ledger.note(mine, controller=name)
        assert await other.claim(wanted, reason="x") is None
        child.kill()
        child.wait()
        assert await other.claim(wanted, reason="x") is not None


async def test_every_change_is_an_event_and_none_goes_where_it_cannot(
    make_ledger: MakeLedger, wanted: Session, log: EventLog
) -> None:
    ledger = await make_ledger("here")
    session = await ledger.claim(wanted, reason="x")
    assert session is not None
    for status in ("active", "stopped", "archived", "resuming", "active", "destroyed"):
        session = await ledger.change(session, status, reason="next")
    with pytest.raises(Defect):
        await ledger.change(session, "active", reason="never")
    steps = await happened(log, wanted.hive_id)
    assert [after for _, after in steps] == [
        "creating", "active", "stopped", "archived", "resuming", "active", "destroyed",
    ]  # fmt: skip


def test_every_status_leads_somewhere_and_all_of_them_to_an_end() -> None:
    assert set(WAYS) == set(STATUSES)
    assert all(ways <= set(STATUSES) for ways in WAYS.values())
    assert all("destroyed" in WAYS[status] for status in STATUSES if status != "destroyed")


async def test_a_session_that_is_not_on_record_is_not_found(make_ledger: MakeLedger) -> None:
    with pytest.raises(NotFound):
        await (await make_ledger("here")).get("00000000-0000-5000-8000-000000000000")


def test_a_process_is_known_by_its_start_and_its_namespace() -> None:
    here = Identity.of_this_process("here")
    assert Identity.parse(str(here)) == here
    assert owner(f"controller:{here}:abcd") == here
    assert not here.is_dead(here)
    assert replace(here, started=here.started + 1).is_dead(here)
    assert not replace(here, started=1, host="elsewhere").is_dead(here)
    assert not replace(here, started=1, namespace=1).is_dead(here)


@pytest.mark.parametrize("text", ["", "controller:", "x", "controller:host.1.2:x", "controller:host.a.b.c:x"])
def test_a_name_that_is_no_controller_s_is_nobody(text: str) -> None:
    assert owner(text) is None


async def test_a_controller_that_cannot_keep_its_lease_is_told(database: Database) -> None:
    leases = Leases(database)
    controller = await Controller.start(leases, "here")
    await leases.release(controller.lease)
    async with asyncio.timeout(30):
        await controller.lost.wait()
    await controller.stop()


def test_a_host_keeps_its_name(tmp_path: Path) -> None:
    home = tmp_path / "home"
    name = host_name(home)
    assert name.startswith("host-") and host_name(home) == name
    assert [path.name for path in home.iterdir()] == ["host"]
