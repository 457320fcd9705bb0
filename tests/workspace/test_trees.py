"""Trees come and go in one step, copies are faithful whatever an agent has made, and sweeping takes nothing in use."""

from __future__ import annotations

import asyncio
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.workspace.conftest import MakeWorkspaces
from tests.workspace.tree_hash import tree_hash

from skep.errors import Conflict, StorageFull, WorkspaceBusy, WorkspaceDamaged
from skep.sandbox.erase import erase
from skep.workspace.holding import Holding, Taken
from skep.workspace.layers.copying import Copying, Index
from skep.workspace.layers.overlay import pierce
from skep.workspace.layers.trees import Trees
from skep.workspace.workspaces import Workspaces

BIRTH = "0123456789abcdef"


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[Trees]:
    made = Trees(tmp_path / "trees")
    yield made
    if made.folder.exists():
        erase(str(made.folder), made.folder.stat().st_ino)


def test_a_tree_that_cannot_be_filled_is_not_made(trees: Trees) -> None:
    def fill(target: Path, _: object) -> None:
        (target / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageFull):
        trees.new(birth=BIRTH, fill=fill)
    assert list(trees.folder.iterdir()) == []


def test_a_tree_belongs_to_a_user_of_its_own_and_its_successor_to_the_same(trees: Trees) -> None:
    first, other = trees.new(birth=BIRTH), trees.new(birth=BIRTH)
    second = trees.new(birth=BIRTH, owner=trees.owner(first))
    if os.geteuid() == 0:
        assert trees.owner(first) == trees.owner(second) != trees.owner(other)
        assert trees.tree(first).stat().st_uid >= 0x70000000
    else:
        assert trees.owner(first) is None
        assert trees.tree(first).stat().st_uid == os.geteuid()
    assert stat.S_IMODE(trees.folder.stat().st_mode) == 0o700


def test_dropping_takes_the_name_at_once_and_clearing_the_room(trees: Trees) -> None:
    tree_id = trees.new(birth=BIRTH)
    deep = trees.tree(tree_id) / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    deep.chmod(0)
    trees.drop([tree_id, "ffffffffffffffff"])
    assert trees.all() == set()
    assert len(list(trees.folder.iterdir())) == 1
    trees.clear()
    assert list(trees.folder.iterdir()) == []


def test_a_tree_is_measured_once(trees: Trees) -> None:
    tree_id = trees.new(birth=BIRTH)
    (trees.tree(tree_id) / "file").write_bytes(os.urandom(100_000))
    first = trees.weigh([tree_id])
    assert 100_000 <= first.size < 120_000 and first.inodes == 1
    (trees.tree(tree_id) / "more").write_bytes(os.urandom(100_000))
    assert trees.weigh([tree_id]) == first, "it is sealed, so it is not looked at again"
    assert trees.note(tree_id).birth == BIRTH


def test_a_missing_tree_is_named(trees: Trees) -> None:
    with pytest.raises(WorkspaceDamaged, match="ffffffffffffffff"):
        trees.check(["ffffffffffffffff"])
    with pytest.raises(WorkspaceDamaged, match="ffffffffffffffff"):
        trees.weigh(["ffffffffffffffff"])


def make_strange(folder: Path) -> None:
    """Put one of each into a folder: what an agent could leave there."""
    (folder / "plain").write_text("plain\n")
    (folder / "twin").hardlink_to(folder / "plain")
    (folder / "link").symlink_to("/nowhere/at/all")
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 50 << 20)
    with (folder / "sparse").open("r+b") as file:
        file.seek(20 << 20)
        file.write(b"island")
    os.mkfifo(folder / "pipe")
    (folder / os.fsdecode(b"bad\xff\n")).write_text("odd")
    os.setxattr(folder / "plain", "user.mark", b"kept")
    (folder / "shut").mkdir()
    (folder / "shut" / "secret").write_text("secret")
    (folder / "shut" / "secret").chmod(0)
    (folder / "shut").chmod(0)
    (folder / "old").write_text("old")
    os.utime(folder / "old", ns=(1_000_000_001, 2_000_000_003))
    at = os.open(folder, os.O_RDONLY)
    for _ in range(300):  # deeper than a path can be long
        os.mkdir("d" * 40, dir_fd=at)
        below = os.open("d" * 40, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    fd = os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=at)
    os.write(fd, b"deep")
    os.close(fd)
    os.close(at)


def test_a_copy_is_faithful_whatever_there_is(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    make_strange(source)
    owner = (0x70000001, 0x70000001) if os.geteuid() == 0 else None
    Copying(target, owner).run([str(source)], over=())
    try:
        assert (target / "plain").read_text() == "plain\n"
        assert (target / "plain").stat().st_ino == (target / "twin").stat().st_ino
        assert (target / "plain").stat().st_ino != (source / "plain").stat().st_ino
        assert str((target / "link").readlink()) == "/nowhere/at/all"
        assert (target / "sparse").stat().st_size == 50 << 20
        assert (target / "sparse").stat().st_blocks * 512 < 1 << 20
        assert (target / "sparse").read_bytes()[20 << 20 :][:6] == b"island"
        assert stat.S_ISFIFO((target / "pipe").lstat().st_mode)
        assert (target / os.fsdecode(b"bad\xff\n")).read_text() == "odd"
        assert os.getxattr(target / "plain", "user.mark") == b"kept"
        for name in ("shut", "old"):
            copied, known = (target / name).stat(), (source / name).stat()
            assert (copied.st_mode, copied.st_mtime_ns) == (known.st_mode, known.st_mtime_ns)
        (target / "shut").chmod(0o700)
        assert stat.S_IMODE((target / "shut" / "secret").stat().st_mode) == 0
        (target / "shut" / "secret").chmod(0o600)
        assert (target / "shut" / "secret").read_text() == "secret"
        depth = subprocess.run(["find", ".", "-name", "bottom"], cwd=target, capture_output=True, text=True)
        assert depth.stdout.count("/") == 301
        if owner:
            assert {(target / name).lstat().st_uid for name in ("plain", "link", "pipe", "old")} == {owner[0]}
    finally:
        for folder in (source, target):
            erase(str(folder), folder.stat().st_ino)


def test_merged_layers_share_their_files_and_keep_the_marks_that_are_needed(tmp_path: Path) -> None:
    upper, lower, target = (tmp_path / name for name in ("upper", "lower", "target"))
    for folder in (upper, lower, target):
        folder.mkdir()
    (lower / "gone").write_text("gone")
    (lower / "kept").write_text("kept")
    (upper / "new").write_text("new")
    fd = os.open(upper, os.O_RDONLY)
    pierce(fd, "gone")
    os.close(fd)
    copying = Copying(target, linkable=lambda _: True).run([str(upper), str(lower)])
    assert (target / "kept").stat().st_ino == (lower / "kept").stat().st_ino
    assert (target / "new").stat().st_ino == (upper / "new").stat().st_ino
    mark = (target / "gone").stat()
    assert stat.S_ISCHR(mark.st_mode) and mark.st_rdev == 0
    assert set(copying.shared) == {str(upper), str(lower)}


def test_an_index_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    path = tmp_path / "index"
    assert Index.read(path) is None
    for text in ("", "{", "[]", '{"copy": "/nowhere", "files": {}}', '{"copy": "/", "files": {"a": [1]}}'):
        path.write_text(text)
        assert Index.read(path) is None
    path.write_text('{"copy": "/", "files": {"a": [1, 2, 3, 4]}}')
    assert Index.read(path) == Index(Path("/"), {"a": (1, 2, 3, 4)})


def test_a_lock_goes_with_its_process_and_not_with_a_forked_child(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path; from skep.workspace.holding import Holding\n"
        "held = Holding.take(Path(sys.argv[1]))\n"
        "if os.fork() == 0:\n    sys.stdout.write('child\\n'); sys.stdout.flush(); time.sleep(1000)\n"
        "time.sleep(1000)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "child\n"
        with pytest.raises(Taken, match=f"held by process {child.pid}"):
            Holding.take(tmp_path)
        os.kill(child.pid, 9)
        child.wait()
        Holding.take(tmp_path).close()
    finally:
        os.killpg(child.pid, 9)
        child.communicate()


async def test_one_of_many_who_make_the_same_workspace_makes_it(make_workspaces: MakeWorkspaces, home: Path) -> None:
    attempts = [make_workspaces().create("hv-one") for _ in range(8)]
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    made = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert len(made) == 1
    assert all(isinstance(outcome, (Conflict, WorkspaceBusy)) for outcome in outcomes if outcome not in made)
    assert make_workspaces().show("hv-one") == made[0]


async def test_sweeping_all_the_time_takes_nothing_that_is_being_made(
    workspaces: Workspaces, make_workspaces: MakeWorkspaces, home: Path
) -> None:
    """One sweeps as fast as it can while others make, fork, keep, return and destroy."""
    ended = threading.Event()
    failures: list[BaseException] = []

    def sweep_on() -> None:
        while not ended.is_set():
            try:
                make_workspaces().sweep()
            except Exception as error:  # noqa: BLE001 - told to the test
                failures.append(error)

    async def live(name: str) -> None:
        mine, chance = make_workspaces(), random.Random(name)
        await mine.create(name)
        for number in range(4):
            tree = mine.trees.tree(mine.show(name).upper)
            (tree / f"f{number}").write_text(name)
            kept = await mine.checkpoint(name)
            child = f"{name}-{number}"
            await mine.fork(name, [child])
            if chance.random() < 0.5:
                await mine.rollback(name, kept.id)
            await mine.destroy(child)
        async with mine.hold(name) as workspace:
            mine.trees.check(workspace.manifest.trees())

    thread = threading.Thread(target=sweep_on)
    thread.start()
    try:
        await asyncio.gather(*(live(f"hv-{number}") for number in range(3)))
    finally:
        ended.set()
        thread.join()
    assert failures == []
    for manifest in workspaces.list():
        async with workspaces.enter(manifest.id) as sandbox:
            assert (await sandbox.run("cat f0 f1 f2 f3")).text == manifest.id * 4
            await tree_hash(sandbox)
