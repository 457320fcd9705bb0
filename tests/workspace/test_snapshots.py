"""Versions of a template come and go in one step, and none goes that somebody uses."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.programs import started
from tests.workspace.workbench import contents, opened, shelf_names, template

from skep.errors import InvalidRequest, NotFound, TemplateInvalid, WorkspaceDamaged
from skep.workspace.snapshot.snapshot import Snapshot
from skep.workspace.snapshot.snapshots import Snapshots


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    return opened(tmp_path)


async def three(snapshots: Snapshots) -> list[Snapshot]:
    return [await snapshots.build("minimal", fresh=True) for _ in range(3)]


async def test_the_minimal_template_needs_no_network_to_be_built(snapshots: Snapshots) -> None:
    built = await snapshots.build("minimal")
    assert snapshots.latest("minimal") == built
    assert built.version.startswith("v0001-")
    assert built.hash.startswith(built.version.removeprefix("v0001-"))
    assert (built.tree / ".venv/bin/python").is_symlink()
    assert {"hive", "attachments", "output", ".venv", "pyproject.toml"} == {one.name for one in built.tree.iterdir()}
    assert (built.tree / "output/display").is_dir()
    assert built.size_bytes > 0
    assert built.files > 5


async def test_the_same_content_is_built_once(snapshots: Snapshots, tmp_path: Path) -> None:
    first = await snapshots.build("minimal")
    told: list[str] = []
    assert await snapshots.build("minimal", on_progress=told.append) == first
    assert told == [f"{first.version} holds exactly this"]
    assert shelf_names(tmp_path, "minimal") == {first.version, "latest"}


async def test_a_fresh_build_is_another_version_of_the_same_content(snapshots: Snapshots) -> None:
    first, second = await snapshots.build("minimal"), await snapshots.build("minimal", fresh=True)
    assert (first.version[:5], second.version[:5]) == ("v0001", "v0002")
    assert first.hash == second.hash
    assert contents(first.tree) == contents(second.tree)
    assert snapshots.latest("minimal") == second


async def test_ready_builds_only_when_there_is_nothing(snapshots: Snapshots) -> None:
    first = await snapshots.ready("minimal")
    second = await snapshots.build("minimal", fresh=True)
    assert await snapshots.ready("minimal") == second
    snapshots.rollback("minimal", first.version)
    assert await snapshots.ready("minimal") == first


async def test_any_version_can_be_the_latest_again(snapshots: Snapshots) -> None:
    built = await three(snapshots)
    assert [one.version for one in snapshots.versions("minimal")] == [one.version for one in built]
    for one in (built[0], built[2], built[1]):
        assert snapshots.rollback("minimal", one.version) == one
        assert snapshots.latest("minimal") == one


@pytest.mark.parametrize("version", ["v0009-000000000000", "", "latest", "../minimal", "v0001", "/etc", "v0001-x\n"])
async def test_a_version_that_is_not_there_is_not_found(version: str, snapshots: Snapshots) -> None:
    built = await snapshots.build("minimal")
    for call in (snapshots.rollback, snapshots.get):
        with pytest.raises(NotFound) as caught:
            call("minimal", version)
        assert built.version in (caught.value.hint or "")
    assert snapshots.latest("minimal") == built


@pytest.mark.parametrize("name", ["../escape", "", "No", "a/b", "x" * 100])
def test_a_name_that_is_none_is_refused(name: str, snapshots: Snapshots) -> None:
    for call in (snapshots.latest, snapshots.versions):
        with pytest.raises(InvalidRequest):
            call(name)


def test_what_was_never_built_says_how_to_build_it(snapshots: Snapshots) -> None:
    assert snapshots.versions("minimal") == []
    with pytest.raises(NotFound) as caught:
        snapshots.latest("minimal")
    assert caught.value.hint == "skep template build minimal"


async def test_a_template_that_is_wrong_is_told_before_anything_is_made(snapshots: Snapshots, tmp_path: Path) -> None:
    template(tmp_path, "wrong", python={"dependencies": ["-e ."]})
    with pytest.raises(TemplateInvalid):
        await snapshots.build("wrong")
    assert not (tmp_path / "snapshots/wrong").exists()


async def test_what_nobody_uses_is_collected(snapshots: Snapshots, tmp_path: Path) -> None:
    first, second, third = await three(snapshots)
    removed = snapshots.collect({("minimal", first.version), ("other", second.version)})
    assert removed == [second]
    assert shelf_names(tmp_path, "minimal") == {first.version, third.version, "latest"}
    assert snapshots.collect(set()) == [first]
    assert snapshots.collect(set()) == []
    assert snapshots.latest("minimal") == third


async def test_the_latest_stays_though_it_is_not_the_newest(snapshots: Snapshots) -> None:
    first, second, third = await three(snapshots)
    snapshots.rollback("minimal", first.version)
    assert snapshots.collect(set()) == [second, third]
    assert snapshots.latest("minimal") == first


async def test_a_pinned_version_is_not_collected_by_this_process(snapshots: Snapshots) -> None:
    first, _, _ = await three(snapshots)
    with first.pinned():
        assert first not in snapshots.collect(set())
        assert first.tree.is_dir()
    assert first in snapshots.collect(set())
    with pytest.raises(NotFound), first.pinned():
        pass


_PINNING = """
import sys
from pathlib import Path
from skep.workspace.snapshot.snapshot import read
with read(Path(sys.argv[1])).pinned():
    print("pinned", flush=True)
    sys.stdin.read()
"""


async def test_a_version_pinned_by_another_process_is_collected_once_that_has_been_killed(snapshots: Snapshots) -> None:
    first, _, _ = await three(snapshots)
    command = [sys.executable, "-c", _PINNING, str(first.folder)]
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"pinned\n"
        assert first not in snapshots.collect(set())
        other.kill()
        other.wait()
    assert first in snapshots.collect(set())


async def test_nobody_pins_what_is_being_collected(snapshots: Snapshots) -> None:
    """Two threads pin and collect the same version at once: whoever comes first wins, and nobody holds a ghost."""
    for _ in range(10):
        old = await snapshots.build("minimal", fresh=True)
        await snapshots.build("minimal", fresh=True)
        start = threading.Barrier(2)
        held: list[bool] = []

        def pin(old: Snapshot = old, start: threading.Barrier = start, held: list[bool] = held) -> None:
            start.wait(10)
            try:
                with old.pinned():
                    held.append(old.tree.is_dir())
            except NotFound:
                pass

        thread = threading.Thread(target=pin)
        thread.start()
        start.wait(10)
        removed = old in snapshots.collect(set())
        thread.join(10)
        # With the pin taken, the tree was there while it was held; it may have been collected before or afterwards.
        assert held in ([], [True])
        assert held or removed


async def test_two_builds_at_once_wait_for_each_other(snapshots: Snapshots, tmp_path: Path) -> None:
    first, second = await asyncio.gather(snapshots.build("minimal"), snapshots.build("minimal"))
    assert first == second
    assert shelf_names(tmp_path, "minimal") == {first.version, "latest"}


async def test_a_build_that_is_cancelled_leaves_nothing(snapshots: Snapshots, tmp_path: Path) -> None:
    before = await snapshots.build("minimal")
    told = asyncio.Event()
    task = asyncio.create_task(snapshots.build("minimal", fresh=True, on_progress=lambda _: told.set()))
    waiting = asyncio.create_task(told.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        assert shelf_names(tmp_path, "minimal") == {before.version, "latest"}
    finally:
        waiting.cancel()
    assert snapshots.latest("minimal") in snapshots.versions("minimal")


@pytest.mark.parametrize("damage", ["{", "{}", '{"v": 2}', "null", "\0" * 100])
async def test_a_damaged_record_is_told_and_the_other_versions_still_serve(damage: str, snapshots: Snapshots) -> None:
    first, second, third = await three(snapshots)
    (second.folder / "snapshot.json").write_text(damage)
    with pytest.raises(WorkspaceDamaged, match=second.version):
        snapshots.get("minimal", second.version)
    assert snapshots.versions("minimal") == [first, third]


async def test_a_latest_that_leads_nowhere_is_told_and_the_next_build_mends_it(snapshots: Snapshots) -> None:
    built = await snapshots.build("minimal")
    for target in ("v0007-000000000000", "../../elsewhere"):
        (built.folder.parent / "latest").unlink()
        (built.folder.parent / "latest").symlink_to(target)
        with pytest.raises(WorkspaceDamaged) as caught:
            snapshots.latest("minimal")
        assert caught.value.hint == "skep template build minimal"
    await snapshots.build("minimal")
    assert snapshots.latest("minimal") == built


async def test_a_home_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    from skep.errors import Unavailable

    tmp_path.chmod(0o500)
    try:
        with pytest.raises(Unavailable, match="cannot be written"):
            await opened(tmp_path).build("minimal")
    finally:
        tmp_path.chmod(0o700)
