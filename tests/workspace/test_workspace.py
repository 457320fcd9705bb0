"""A held workspace: its sandbox, its guests, what is shown in it; and plain folders that become workspaces."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.workspace.conftest import MakeWorkspaces, make_snapshot
from tests.workspace.tree_hash import tree_hash

from skep.errors import Conflict, InvalidRequest, SandboxLost, WorkspaceDamaged
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.workspace import Workspace
from skep.workspace.workspaces import Workspaces


async def test_a_lost_sandbox_is_followed_by_another_over_the_same_files(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        first = await workspace.sandbox()
        assert (await first.run("echo mine > note")).ok
        await first.stop()
        second = await workspace.sandbox()
        assert second is not first
        assert (await second.run("cat note")).text == "mine\n"


async def test_a_suspended_workspace_runs_nothing_until_it_is_resumed(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run("echo mine > note")).ok
        assert (await workspace.suspend()).suspended
        assert not await sandbox.alive()
        with pytest.raises(Conflict, match="is suspended") as caught:
            await workspace.sandbox()
        assert caught.value.hint == "skep workspace resume hv-one"
    assert workspaces.show("hv-one").suspended
    await workspaces.checkpoint("hv-one", "while suspended")
    assert not (await workspaces.resume("hv-one")).suspended
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("cat note")).text == "mine\n"


async def test_a_holder_waits_for_its_guests_and_a_guest_that_finds_nobody_holds(
    workspaces: Workspaces, make_workspaces: MakeWorkspaces
) -> None:
    await workspaces.create("hv-one")
    other, inside, leave = make_workspaces(), asyncio.Event(), asyncio.Event()

    async def guest() -> str:
        async with other.enter("hv-one") as sandbox:
            inside.set()
            await leave.wait()
            return (await sandbox.run("cat /tmp/note")).text

    async def holder() -> None:
        async with workspaces.enter("hv-one") as sandbox:
            assert (await sandbox.run("echo held > /tmp/note")).ok
            visit.append(asyncio.create_task(guest()))
            await inside.wait()

    visit: list[asyncio.Task[str]] = []
    holding = asyncio.create_task(holder())
    await inside.wait()
    await asyncio.wait((holding,), timeout=0.1)
    assert not holding.done(), "its guest is still there"
    leave.set()
    assert await visit[0] == "held\n"
    await holding
    async with other.enter("hv-one") as sandbox:
        assert (await sandbox.run("test -e /tmp/note || echo another")).text == "another\n"


async def test_a_cancelled_holder_does_not_wait(workspaces: Workspaces, make_workspaces: MakeWorkspaces) -> None:
    await workspaces.create("hv-one")
    holds = asyncio.Event()

    async def holder() -> None:
        async with workspaces.enter("hv-one"):
            holds.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(holder())
    await holds.wait()
    async with make_workspaces().enter("hv-one") as sandbox:
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        with pytest.raises(SandboxLost):
            await sandbox.run("true")


async def test_many_who_enter_at_once_share_one_sandbox(make_workspaces: MakeWorkspaces) -> None:
    await make_workspaces().create("hv-one")
    everybody_in = asyncio.Barrier(12)

    async def use(number: int) -> str:
        async with make_workspaces().enter("hv-one") as sandbox:
            await everybody_in.wait()
            assert (await sandbox.run(f"echo {number} > n{number}")).ok
            return sandbox.id

    ids = await asyncio.gather(*(use(number) for number in range(12)))
    assert len(set(ids)) == 1
    async with make_workspaces().enter("hv-one") as sandbox:
        assert len((await sandbox.run("ls -d n?*")).text.split()) == 13  # and node_modules


async def test_folders_of_the_host_are_shown_where_they_were_asked_for(workspaces: Workspaces, tmp_path: Path) -> None:
    hive, ticket = tmp_path / "hive", tmp_path / "ticket"
    for folder in (hive, ticket):
        folder.mkdir(mode=0o755)
    (hive / "MEMORY.md").write_text("remember\n")
    await workspaces.create("hv-one", shown=[Mount(str(hive), "/workspace/hive")])
    await workspaces.fork("hv-one", ["child"])
    look = "cat hive/MEMORY.md; echo no > hive/MEMORY.md || echo refused; ls ticket"
    for name in ("hv-one", "child"):
        async with workspaces.enter(name, mounts=[Mount(str(ticket), "/workspace/ticket")]) as sandbox:
            assert (await sandbox.run(look)).text == "remember\nrefused\n"
            await workspaces.checkpoint(name)
            assert (await sandbox.run(look)).text == "remember\nrefused\n", "after the layers were swapped too"
    assert (hive / "MEMORY.md").read_text() == "remember\n"


async def test_what_a_crash_left_is_settled_by_whoever_holds_it_next(make_workspaces: MakeWorkspaces) -> None:
    settled: list[str] = []

    async def settle(workspace: Workspace) -> None:
        settled.append(str((workspace.manifest.installing or {}).get("step")))
        await workspace.amend(installing=None)

    workspaces = make_workspaces(settle=[settle])
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        await workspace.amend(installing={"step": "half way"})
    async with workspaces.hold("hv-one") as workspace:
        assert workspace.manifest.installing is None
    assert settled == ["None", "half way"]


async def test_an_act_that_was_added_is_done_by_the_holder(make_workspaces: MakeWorkspaces) -> None:
    async def echo(workspace: Workspace, asked: object) -> dict[str, object]:
        return {"id": workspace.id, "asked": asked, "pid": os.getpid()}

    workspaces = make_workspaces(acts={"echo": echo})
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one"):
        said = await make_workspaces().act("hv-one", "echo", {"a": 1})
        assert said == {"id": "hv-one", "asked": {"a": 1}, "pid": os.getpid()}
        with pytest.raises(InvalidRequest, match="cannot 'fly'"):
            await make_workspaces().act("hv-one", "fly")


def plain_folder(home: Path, name: str) -> Path:
    folder = home / "workspaces" / name
    (folder / "deep").mkdir(parents=True)
    (folder / "note").write_text("old\n")
    (folder / "deep" / "file").write_text("deep\n")
    (folder / "output").symlink_to("/etc")
    return folder


async def test_a_plain_folder_becomes_a_workspace_with_all_its_files(workspaces: Workspaces, home: Path) -> None:
    plain_folder(home, "hv-old")
    inode = (home / "workspaces" / "hv-old" / "note").stat().st_ino
    async with workspaces.enter("hv-old") as sandbox:
        ran = await sandbox.run(
            "cat note deep/file; readlink output; test -w note && echo mine; test -e .venv || echo bare"
        )
        assert ran.text == "old\ndeep\n/etc\nmine\nbare\n"
    manifest = workspaces.show("hv-old")
    assert (home / "trees" / manifest.upper / "tree" / "note").stat().st_ino == inode, "nothing was copied"
    assert not (Path("/etc") / "display").exists()
    workspaces.sweep()
    async with workspaces.enter("hv-old") as sandbox:
        assert (await sandbox.run("cat note")).text == "old\n"


async def test_a_plain_folder_that_is_created_gets_the_snapshot_below_its_files(
    workspaces: Workspaces, home: Path
) -> None:
    plain_folder(home, "hv-old")
    await workspaces.create("hv-old")
    async with workspaces.enter("hv-old") as sandbox:
        assert (await sandbox.run("cat note; tool")).text == "old\ntool one\n"


async def test_a_plain_folder_with_an_environment_keeps_its_own(workspaces: Workspaces, home: Path) -> None:
    (plain_folder(home, "hv-old") / ".venv").mkdir()
    await workspaces.create("hv-old")
    async with workspaces.enter("hv-old") as sandbox:
        assert (await sandbox.run("cat note; ls -A .venv")).text == "old\n"


async def test_a_workspace_keeps_its_snapshot_when_a_newer_one_is_the_latest(
    workspaces: Workspaces, snapshots: Snapshots, home: Path
) -> None:
    await workspaces.create("hv-old")
    make_snapshot(home, number=2, files={".venv/bin/tool": "#!/bin/sh\necho tool two\n"})
    await workspaces.create("hv-new")
    for name, says in (("hv-old", "tool one\n"), ("hv-new", "tool two\n")):
        async with workspaces.enter(name) as sandbox:
            assert (await sandbox.run("tool")).text == says
    assert {version for _, version in workspaces.in_use()} == {
        snapshot.version for snapshot in snapshots.versions("minimal")
    }
    assert snapshots.collect(workspaces.in_use()) == []


async def test_a_workspace_that_is_held_cannot_be_destroyed(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("echo mine > note")).ok
        with pytest.raises(Conflict, match=f"held by process {os.getpid()}"):
            await workspaces.destroy("hv-one")
        assert (await sandbox.run("cat note")).text == "mine\n"


async def test_a_workspace_that_cannot_be_archived_is_not_destroyed(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("echo mine > note")).ok
        known = await tree_hash(sandbox)
    seen: list[str] = []

    async def archive(workspace: Workspace) -> None:
        seen.append(workspace.id)
        raise WorkspaceDamaged("the store is full")

    with pytest.raises(WorkspaceDamaged, match="the store is full"):
        await workspaces.destroy("hv-one", archive=archive)
    assert seen == ["hv-one"]
    async with workspaces.enter("hv-one") as sandbox:
        assert await tree_hash(sandbox) == known


async def test_a_checkpoint_that_is_cancelled_is_made_or_not_and_the_sandbox_agrees(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        sandbox: Sandbox = await workspace.sandbox()
        for number in range(10):
            assert (await sandbox.run(f"echo {number} > note")).ok
            task = asyncio.create_task(workspace.checkpoint())
            await asyncio.sleep(number * 0.002)
            task.cancel()
            await asyncio.wait((task,))
            assert (await sandbox.run(f"echo {number} > after; cat note")).text == f"{number}\n"
            upper = workspaces.trees.tree(workspace.manifest.upper)
            assert (upper / "after").read_text() == f"{number}\n", "what is written is in the tree that is kept"
