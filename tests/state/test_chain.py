"""Verify names the first bad record, whatever was done to the log, on both databases."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from skep.state.chain import Fault, Verdict, total, verify
from skep.state.checkpoint import Signer
from skep.state.database import Database
from skep.state.events import Noted
from skep.state.log import EventLog
from skep.state.record import GENESIS, link
from skep.state.schema import checkpoints, event_heads, events

HIVE, OTHER = "hv-a", "hv-b"
COUNT = 30
EVERY = 10


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.open(tmp_path / "keys" / "events.pem")


@pytest.fixture
async def written(database: Database, signer: Signer) -> Database:
    """Give a log of two hives with checkpoints at 10, 20 and 30."""
    await write(database, signer)
    return database


async def write(database: Database, signer: Signer | None, count: int = COUNT) -> None:
    log = EventLog(database, signer=signer, checkpoint_every=EVERY)
    for hive_id in (HIVE, OTHER):
        for first in range(0, count, EVERY):
            notes = [Noted(text=f"note {number}") for number in range(first, min(first + EVERY, count))]
            await log.append_all(notes, hive_id=hive_id, account_id="acme", actor="me", task_id="t-1")
    await log.close()


async def tamper(database: Database, *statements: Any) -> None:
    """Do what somebody with full rights on the database could do."""
    async with database.write() as connection:
        for table in ("skep_events", "skep_checkpoints"):
            for trigger in await triggers(connection, table, database.dialect):
                on = f" ON {table}" if database.dialect == "postgresql" else ""
                await connection.execute(text(f"DROP TRIGGER {trigger}{on}"))
        for statement in statements:
            await connection.execute(statement)


async def triggers(connection: Any, table: str, dialect: str) -> list[str]:
    catalogue = {
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = :table",
        "postgresql": "SELECT tgname FROM pg_trigger WHERE tgrelid = CAST(:table AS regclass)",
    }
    return [row[0] for row in await connection.execute(text(catalogue[dialect]), {"table": table})]


def at(seq: int) -> Any:
    return (events.c.hive_id == HIVE) & (events.c.seq == seq)


async def read(database: Database, column: Any, seq: int) -> Any:
    async with database.read() as connection:
        return (await connection.execute(select(column).where(at(seq)))).scalar_one()


def bad(verdict: Verdict) -> tuple[str, int]:
    assert not verdict.ok
    assert verdict.first_bad is not None
    assert verdict.faults == (verdict.first_bad,), "the other hive is untouched"
    return verdict.first_bad.hive_id, verdict.first_bad.seq


async def test_an_untouched_log_verifies(written: Database, signer: Signer) -> None:
    assert await verify(written, signer=signer) == Verdict(count=2 * COUNT, hives=2, unanchored=0)
    assert await verify(written, HIVE, signer=signer) == Verdict(count=COUNT, hives=1, unanchored=0)
    assert await total(written) == 2 * COUNT
    assert await total(written, HIVE) == COUNT


async def test_dropping_the_triggers_alone_breaks_nothing(written: Database, signer: Signer) -> None:
    await tamper(written)
    assert (await verify(written, signer=signer)).ok


async def test_an_empty_database_verifies(database: Database, signer: Signer) -> None:
    assert await verify(database, signer=signer) == Verdict(count=0, hives=0, unanchored=0)


@pytest.mark.parametrize("table", [events, checkpoints], ids=lambda table: table.name)
@pytest.mark.parametrize("change", ["update", "delete", "back door"])
async def test_the_database_refuses_to_change_what_is_written(
    written: Database, signer: Signer, table: Any, change: str
) -> None:
    back_door = {
        "sqlite": f"INSERT OR REPLACE INTO {table.name} SELECT * FROM {table.name}",
        "postgresql": f"TRUNCATE {table.name}",
    }
    statement: Any = {
        "update": update(table).values(hash=bytes(32)),
        "delete": delete(table),
        "back door": text(back_door[written.dialect]),
    }[change]
    with pytest.raises((IntegrityError, DBAPIError), match="append-only"):
        async with written.write() as connection:
            await connection.execute(statement)
    assert (await verify(written, signer=signer)).ok


@pytest.mark.parametrize("seq", [1, 2, 15, COUNT])
async def test_a_flipped_bit_in_a_record_is_named(written: Database, signer: Signer, seq: int) -> None:
    record = await read(written, events.c.record, seq)
    changed = record.replace(f"note {seq - 1}", f"note {chr(ord(str(seq - 1)[0]) ^ 1)}{str(seq - 1)[1:]}")
    assert changed != record
    await tamper(written, update(events).where(at(seq)).values(record=changed))
    verdict = await verify(written, signer=signer)
    assert bad(verdict) == (HIVE, seq)
    assert "do not match" in str(verdict.first_bad)


async def test_a_flipped_bit_anywhere_in_a_record_is_named(ready_sqlite_url: str, signer: Signer) -> None:
    """Every seventh bit is tried: some leave text that is not UTF-8, or not JSON."""
    database = await Database.open(ready_sqlite_url)
    await write(database, signer, count=3)
    record: bytes = (await read(database, events.c.record, 2)).encode()
    await tamper(database)
    for place in range(0, len(record) * 8, 7):
        flipped = bytearray(record)
        flipped[place // 8] ^= 1 << place % 8
        async with database.write() as connection:
            await connection.execute(
                text("UPDATE skep_events SET record = CAST(:raw AS TEXT) WHERE hive_id = :hive AND seq = 2"),
                {"raw": bytes(flipped), "hive": HIVE},
            )
        assert bad(await verify(database, signer=signer)) == (HIVE, 2)
    await database.close()


async def test_a_flipped_bit_in_a_hash_is_named(written: Database, signer: Signer) -> None:
    hash_ = bytearray(await read(written, events.c.hash, 12))
    hash_[31] ^= 1
    await tamper(written, update(events).where(at(12)).values(hash=bytes(hash_)))
    assert bad(await verify(written, signer=signer)) == (HIVE, 12)


@pytest.mark.parametrize("seq", [1, 15])
async def test_a_deleted_row_is_named(written: Database, signer: Signer, seq: int) -> None:
    await tamper(written, delete(events).where(at(seq)))
    verdict = await verify(written, signer=signer)
    assert verdict.faults == (Fault(HIVE, seq, f"missing: the next record is number {seq + 1}"),)


async def test_a_swapped_pair_is_named(written: Database, signer: Signer) -> None:
    spare = COUNT + 100
    await tamper(
        written,
        update(events).where(at(14)).values(seq=spare),
        update(events).where(at(15)).values(seq=14),
        update(events).where(at(spare)).values(seq=15),
    )
    verdict = await verify(written, signer=signer)
    assert verdict.faults == (Fault(HIVE, 14, "the record in this place says it is number 15"),)


async def test_a_record_of_another_hive_is_named(written: Database, signer: Signer) -> None:
    async with written.read() as connection:
        mine = select(events.c.record).where(events.c.hive_id == OTHER, events.c.seq == 7)
        record = (await connection.execute(mine)).scalar_one()
    await tamper(written, update(events).where(at(7)).values(record=record))
    assert bad(await verify(written, signer=signer)) == (HIVE, 7)


@pytest.mark.parametrize("column", ["account_id", "task_id", "type", "at", "actor"])
async def test_an_edited_copy_is_named_with_both_values(written: Database, signer: Signer, column: str) -> None:
    await tamper(written, update(events).where(at(9)).values({column: "forged"}))
    verdict = await verify(written, signer=signer)
    assert bad(verdict) == (HIVE, 9)
    assert f"the column {column} says 'forged', the record says" in str(verdict.first_bad)


async def test_an_emptied_copy_is_named(written: Database, signer: Signer) -> None:
    await tamper(written, update(events).where(at(9)).values(task_id=None))
    verdict = await verify(written, signer=signer)
    assert "the column task_id says nothing, the record says 't-1'" in str(verdict.first_bad)


def cut(last: int) -> list[Any]:
    return [delete(events).where(events.c.hive_id == HIVE, events.c.seq > last)]


async def consistent_cut(database: Database, last: int) -> list[Any]:
    """Cut the tail and put the database's own note of the end back to match."""
    hash_ = await read(database, events.c.hash, last)
    note = update(event_heads).where(event_heads.c.hive_id == HIVE)
    return [*cut(last), note.values(seq=last, hash=hash_, checkpoint_seq=0)]


async def test_a_cut_tail_shows_against_the_note_of_the_end(written: Database) -> None:
    await tamper(written, *cut(25))
    verdict = await verify(written)
    assert bad(verdict) == (HIVE, 26)
    assert "covers records up to 30" in str(verdict.first_bad)


async def test_a_cut_tail_with_a_forged_end_shows_against_the_checkpoint(written: Database, signer: Signer) -> None:
    await tamper(written, *await consistent_cut(written, 25))
    assert (await verify(written)).ok, "without the key there is nothing left to see it by"
    verdict = await verify(written, signer=signer)
    assert bad(verdict) == (HIVE, 26)
    assert "the checkpoint signed at" in str(verdict.first_bad)


async def test_a_cut_tail_shows_though_the_database_lost_its_checkpoints_too(written: Database, signer: Signer) -> None:
    await tamper(written, *await consistent_cut(written, 25), delete(checkpoints))
    assert bad(await verify(written, signer=signer)) == (HIVE, 26)


async def test_a_log_that_is_gone_as_a_whole_is_missed(written: Database, signer: Signer) -> None:
    gone = [delete(table).where(table.c.hive_id == HIVE) for table in (events, event_heads, checkpoints)]
    await tamper(written, *gone)
    verdict = await verify(written, signer=signer)
    assert bad(verdict) == (HIVE, 1)


async def test_a_cut_within_a_checkpoint_stays_visible_when_the_log_grows_on(written: Database, signer: Signer) -> None:
    """The newest checkpoint in the file is evidence: the next signature must not replace it."""
    await tamper(written, *await consistent_cut(written, 25), delete(checkpoints))
    await write(written, signer, count=COUNT)
    verdict = await verify(written, signer=signer)
    assert bad(verdict) == (HIVE, 30)
    assert "not those that the checkpoint" in str(verdict.first_bad)


async def test_a_history_rewritten_with_fresh_hashes_shows_at_the_next_checkpoint(
    written: Database, signer: Signer
) -> None:
    statements: list[Any] = []
    hash_ = GENESIS
    for seq in range(1, COUNT + 1):
        record: str = (await read(written, events.c.record, seq)).replace("note 14", "nope 14")
        hash_ = link(hash_, record.encode())
        statements.append(update(events).where(at(seq)).values(record=record, hash=hash_))
    head = update(event_heads).where(event_heads.c.hive_id == HIVE).values(hash=hash_)
    await tamper(written, *statements, head)
    assert (await verify(written)).ok, "the chain alone is consistent again"
    assert bad(await verify(written, signer=signer)) == (HIVE, 20)


async def test_a_forged_record_that_is_no_event_is_named_and_not_tripped_over(
    written: Database, signer: Signer
) -> None:
    previous = await read(written, events.c.hash, 4)
    for nonsense in ("5", "[]", "{}", '{"seq":5}', '{"seq":5,"task":1}', "[" * 5000):
        forged = {"record": nonsense, "hash": link(previous, nonsense.encode())}
        await tamper(written, update(events).where(at(5)).values(forged))
        assert bad(await verify(written, signer=signer)) == (HIVE, 5)


async def test_a_forged_checkpoint_is_named(written: Database, signer: Signer) -> None:
    where = (checkpoints.c.hive_id == HIVE) & (checkpoints.c.seq == 20)
    await tamper(written, update(checkpoints).where(where).values(hash=bytes(32)))
    verdict = await verify(written, signer=signer)
    assert bad(verdict) == (HIVE, 20)
    assert "signature" in str(verdict.first_bad)


async def test_a_forged_checkpoint_file_is_named(written: Database, signer: Signer) -> None:
    (signer.anchors.folder / f"{HIVE}.json").write_text("{}")
    verdict = await verify(written, signer=signer)
    assert bad(verdict) == (HIVE, 0)
    assert "does not hold a checkpoint" in str(verdict.first_bad)


@pytest.mark.parametrize("end", [29, 31])
async def test_a_forged_note_of_the_end_is_named(written: Database, signer: Signer, end: int) -> None:
    await tamper(written, update(event_heads).where(event_heads.c.hive_id == HIVE).values(seq=end))
    verdict = await verify(written, signer=signer)
    assert bad(verdict) == (HIVE, end)


async def test_each_hive_with_a_fault_is_named(written: Database, signer: Signer) -> None:
    await tamper(written, update(events).where(events.c.seq == 8).values(actor="forged"))
    verdict = await verify(written, signer=signer)
    assert [(fault.hive_id, fault.seq) for fault in verdict.faults] == [(HIVE, 8), (OTHER, 8)]


async def test_a_log_without_a_key_verifies_and_says_what_it_leaves_open(database: Database) -> None:
    await write(database, signer=None, count=7)
    verdict = await verify(database, HIVE)
    assert (verdict.ok, verdict.count, verdict.unanchored) == (True, 7, 7)
    assert any("no signing key" in remark for remark in verdict.remarks)
    assert any("unanchored" in remark and "7" in remark for remark in verdict.remarks)


async def test_checkpoints_of_another_key_are_remarked_and_not_trusted(written: Database, tmp_path: Path) -> None:
    verdict = await verify(written, signer=Signer.open(tmp_path / "other" / "events.pem"))
    assert verdict.ok
    assert verdict.unanchored == 2 * COUNT
    assert any("another key" in remark for remark in verdict.remarks)


async def test_progress_counts_every_record(written: Database, signer: Signer) -> None:
    heard: list[int] = []
    await verify(written, signer=signer, progress=heard.append)
    assert sum(heard) == 2 * COUNT


async def test_verify_holds_while_others_append(database: Database, signer: Signer) -> None:
    log = EventLog(database, signer=signer, checkpoint_every=EVERY)

    async def append(number: int) -> None:
        for _ in range(50):
            await log.append(Noted(text=f"by {number}"), hive_id=HIVE, account_id="acme", actor="me")

    writers = asyncio.gather(*(append(number) for number in range(4)))
    while not writers.done():
        assert (await verify(database, signer=signer)).ok
    await writers
    await log.close()
    assert await verify(database, signer=signer) == Verdict(count=200, hives=1, unanchored=0)


@pytest.mark.parametrize("chunk", [1, 7, COUNT])
async def test_the_size_of_a_chunk_changes_no_verdict(
    written: Database, signer: Signer, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("skep.state.chain.CHUNK", chunk)
    assert await verify(written, signer=signer) == Verdict(count=2 * COUNT, hives=2, unanchored=0)
    await tamper(written, delete(events).where(events.c.hive_id == HIVE, events.c.seq.between(8, 28)))
    assert (await verify(written, signer=signer)).faults == (Fault(HIVE, 8, "missing: the next record is number 29"),)
