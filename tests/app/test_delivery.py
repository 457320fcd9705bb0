"""What is sent arrives, what is made is delivered once, and both are on record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.app.test_reception import home, program, resolved  # noqa: F401  fixtures

from skep.app.delivery import Delivery, from_disk
from skep.app.program import Program
from skep.app.residence import THREAD, Residence
from skep.errors import InvalidRequest, NotFound
from skep.sessions.attachments import Sent
from skep.sessions.computer import Computer
from skep.state.events import ArtifactsCollected, AttachmentsReceived


@pytest.fixture
async def desk(program: Program) -> AsyncIterator[tuple[Delivery, Computer]]:  # noqa: F811
    async with resolved(program) as (sessions, computer):
        hive = await program.hives.show("garden", account_id="bees")
        yield Delivery(program, sessions.wanted(hive, THREAD), actor="cli:me"), computer


async def test_files_arrive_and_hostile_names_are_on_record_safely(
    desk: tuple[Delivery, Computer],
    program: Program,  # noqa: F811
    tmp_path: Path,
) -> None:
    delivery, computer = desk
    (tmp_path / "notes.txt").write_text("hello")
    arrival = await delivery.attach(
        computer, [from_disk(tmp_path / "notes.txt"), Sent("../\x1b[31mup\udcff", b"x" * 10)]
    )
    assert [one.path for one in arrival.arrived] == ["attachments/notes.txt", "attachments/[31mup"]
    hive = await program.hives.show("garden", account_id="bees")
    (recorded,) = await program.log.page(hive.id, types=["attachments_received"])
    assert isinstance(recorded.event, AttachmentsReceived)
    assert [one["path"] for one in recorded.event.files] == ["attachments/notes.txt", "attachments/[31mup"]
    assert "\x1b" not in recorded.event.model_dump_json()


async def test_only_what_has_changed_is_delivered_again(
    desk: tuple[Delivery, Computer],
    program: Program,  # noqa: F811
) -> None:
    delivery, computer = desk
    await computer.run("printf 'a,b\\n1,2\\n' > output/display/table.csv; echo 1 > output/display/note.txt")
    assert {one.name for one in (await delivery.collect(computer)).artifacts} == {"table.csv", "note.txt"}
    assert (await delivery.collect(computer)).artifacts == ()
    await computer.run("echo 2 > output/display/note.txt")
    assert [one.name for one in (await delivery.collect(computer)).artifacts] == ["note.txt"]
    newest = await delivery.find("note.txt")
    assert b"".join([piece async for piece in delivery.shelf.get(newest.sha256)]) == b"2\n"
    assert (await delivery.find(newest.sha256[:8])) == newest
    with pytest.raises(NotFound):
        await delivery.find("nothing")
    hive = await program.hives.show("garden", account_id="bees")
    assert len(await program.log.page(hive.id, types=["artifacts_collected"])) == 2


async def test_artifacts_of_other_sessions_are_not_found(
    desk: tuple[Delivery, Computer],
    program: Program,  # noqa: F811
) -> None:
    delivery, computer = desk
    await computer.run("echo secret > output/display/note.txt")
    await delivery.collect(computer)
    hive = await program.hives.show("garden", account_id="bees")
    other = Delivery(program, Residence("00000000-0000-5000-8000-000000000000", hive, "cli:other").session, actor="me")
    assert await other.delivered() == []
    with pytest.raises(NotFound):
        await other.find("note.txt")


async def test_many_large_previews_are_more_than_one_record(
    desk: tuple[Delivery, Computer],
    program: Program,  # noqa: F811
) -> None:
    delivery, computer = desk
    row, rest = ",".join(["é" * 80] * 20), "," * 18
    rows = f"for i in $(seq 9); do echo '{row}'; done; echo \"$n,{rest}\""
    await computer.run(f"for n in $(seq 60); do ({rows}) > output/display/$n.csv; done")
    assert len((await delivery.collect(computer)).artifacts) == 60
    hive = await program.hives.show("garden", account_id="bees")
    recorded = await program.log.page(hive.id, types=["artifacts_collected"])
    assert len(recorded) > 1
    assert sum(len(one.event.files) for one in recorded if isinstance(one.event, ArtifactsCollected)) == 60
    assert (await delivery.collect(computer)).artifacts == ()


def test_a_folder_is_not_sent(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is no file"):
        from_disk(tmp_path)
