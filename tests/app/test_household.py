"""A hive finds its memory and skills in its workspace, read-only, and shares a ticket with the account's others."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from skep import Sandbox
from skep.app.household import Household, ticket
from skep.errors import InvalidRequest, SkepError
from skep.sandbox.stack import Stack


def household(home: Path) -> Household:
    made = Household(home, "hv-a", "acme", "garden")
    made.settle()
    return made


def workspace(folder: Path) -> Stack:
    for name in ("tree", "work"):
        (folder / name).mkdir(parents=True)
    return Stack(str(folder / "tree"), str(folder / "work"))


def test_a_hive_reads_what_it_is_its_memory_and_every_shelf_of_skills(tmp_path: Path) -> None:
    hive = household(tmp_path)
    for shelf, folder in hive.skills.items():
        (folder / "note").write_text(f"of the {shelf}\n")
    with Sandbox.create(stack=workspace(tmp_path / "w"), mounts=hive.mounts()) as sandbox:
        read = sandbox.run(
            "cd hive && cat .hive.toml MEMORY.md skills/system/note skills/account/note skills/hive/note"
        )
    about, _, rest = read.text.partition("# Memory")
    assert tomllib.loads(about) == {"id": "hv-a", "name": "garden", "account": "acme"}
    assert rest.endswith("of the system\nof the account\nof the hive\n")


def test_nothing_of_it_can_be_changed_from_inside(tmp_path: Path) -> None:
    hive = household(tmp_path)
    (hive.skills["system"] / "note").write_text("as it was")
    attempts = (
        "echo x > hive/MEMORY.md",
        "echo x > hive/new",
        "rm hive/.hive.toml",
        "echo x > hive/skills/system/note",
        "mkdir hive/skills/hive/mine",
        "mv hive elsewhere",
    )
    with Sandbox.create(stack=workspace(tmp_path / "w"), mounts=hive.mounts()) as sandbox:
        ended = [sandbox.run(attempt).ok for attempt in attempts]
        control = sandbox.run("echo x > mine").ok
    assert (ended, control) == ([False] * len(attempts), True)
    assert (hive.skills["system"] / "note").read_text() == "as it was"


def test_hives_of_an_account_change_each_others_files_in_a_ticket(tmp_path: Path) -> None:
    with (
        Sandbox.create(stack=workspace(tmp_path / "1"), mounts=[ticket(tmp_path, "acme", "spring")]) as one,
        Sandbox.create(stack=workspace(tmp_path / "2"), mounts=[ticket(tmp_path, "acme", "spring")]) as two,
    ):
        assert one.run("umask 077; echo sown > ticket/bed").ok
        assert two.run("cat ticket/bed && echo watered >> ticket/bed").text == "sown\n"
        assert one.run("cat ticket/bed").text == "sown\nwatered\n"
    written = tmp_path / "tickets/acme/spring/bed"
    assert written.stat().st_uid == written.parent.stat().st_uid
    assert written.stat().st_uid != 0


def test_another_account_has_another_ticket_of_the_same_name(tmp_path: Path) -> None:
    assert ticket(tmp_path, "acme", "spring").host != ticket(tmp_path, "other", "spring").host


@pytest.mark.parametrize("name", ["../acme", "", "a/b", "Spring", "."])
def test_a_name_that_leads_elsewhere_is_no_ticket(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="ticket is not a valid name"):
        ticket(tmp_path, "acme", name)


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    hive = household(tmp_path)
    (hive.folder / "MEMORY.md").write_text("remembered")
    hive.settle()
    assert (hive.folder / "MEMORY.md").read_text() == "remembered"
    assert [file.name for file in hive.folder.iterdir() if ".part" in file.name] == []


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "hives").write_text("not a folder")
    with pytest.raises(SkepError, match="hives/hv-a"):
        household(tmp_path)
