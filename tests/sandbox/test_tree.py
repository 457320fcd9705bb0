"""The files of a workspace at rest, and what `Tree` keeps by itself; a live sandbox's are in the contract."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skep.errors import Denied, InvalidRequest, LimitReached, NotFound, SandboxLost, StorageFull
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.tree import Tree, acting_as


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / "workspace"


@pytest.fixture
def tree(workspace: Path) -> Iterator[Tree]:
    opened = Tree.at(str(workspace))
    yield opened
    opened.close()


async def test_paths_at_rest_are_those_of_the_sandbox(tree: Tree, workspace: Path) -> None:
    await tree.write("/workspace/a/file", b"1")
    await tree.append("a/file", b"2")
    assert (workspace / "a" / "file").read_bytes() == b"12" == await tree.read("./a/../a/file")
    assert [entry.name for entry in await tree.list("/workspace")] == ["a"]


@pytest.mark.parametrize("path", ["/etc/passwd", "/workspace/../etc/passwd", "../x", "/workspaces", "/", "/tmp/x"])
async def test_at_rest_there_is_only_the_workspace(tree: Tree, path: str) -> None:
    with pytest.raises(InvalidRequest, match="not below"):
        await tree.read(path)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../secret", "/workspace/file", "/proc/self/environ"])
async def test_at_rest_a_link_that_leads_out_is_refused(tree: Tree, workspace: Path, target: str) -> None:
    (workspace / "file").write_bytes(b"mine")
    (workspace / "link").symlink_to(target)
    with pytest.raises(Denied):
        await tree.read("link")
    with pytest.raises(Denied):
        await tree.append("link", b"x")


async def test_at_rest_a_link_that_stays_inside_is_followed(tree: Tree, workspace: Path) -> None:
    await tree.write("a/file", b"mine")
    (workspace / "link").symlink_to("a/file")
    assert await tree.read("link") == b"mine"


async def test_a_folder_reached_by_a_link_that_leads_out_is_refused(
    tree: Tree, workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (workspace / "link").symlink_to("../outside")
    for call in (
        tree.write("link/x", b""), tree.mkdir("link/x/y"), tree.list("link"), tree.move("link/a", "b"),
        tree.remove("link/x"), tree.stat("link/x"), anext(tree.watch("link")),
    ):  # fmt: skip
        with pytest.raises(Denied):
            await call
    assert list((tmp_path / "outside").iterdir()) == []


async def test_files_belong_to_the_workspaces_own_user(tree: Tree, workspace: Path) -> None:
    await tree.write("file", b"")
    await tree.mkdir("a/b")
    await tree.append("log", b"x")
    owner = workspace.stat().st_uid
    assert {path.lstat().st_uid for path in workspace.rglob("*")} == {owner}
    assert (owner == os.geteuid()) == (os.geteuid() != 0)


async def test_a_file_is_closed_to_others_only_where_the_caller_says_so(tree: Tree, workspace: Path) -> None:
    await tree.write("open", b"")
    await tree.write("closed", b"", mode=0o600)
    assert stat.S_IMODE((workspace / "open").stat().st_mode) == 0o644
    assert stat.S_IMODE((workspace / "closed").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_root_reads_with_the_rights_of_the_workspaces_user(tree: Tree, workspace: Path) -> None:
    (workspace / "secret").write_bytes(b"root's")
    (workspace / "secret").chmod(0o600)
    with pytest.raises(Denied):
        await tree.read("secret")
    with pytest.raises(Denied):
        await tree.append("secret", b"x")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_acting_as_another_ends_with_the_block_and_stays_in_its_thread(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"1")
    secret.chmod(0o600)
    seen: list[bytes] = []
    go_on = threading.Event()
    # Started before: a new thread takes over the identity of the one that starts it.
    thread = threading.Thread(target=lambda: seen.extend([secret.read_bytes()] if go_on.wait(10) else []))
    thread.start()
    with acting_as((61234, 61234)):
        with pytest.raises(PermissionError):
            secret.read_bytes()
        go_on.set()
        thread.join()
    assert [*seen, secret.read_bytes()] == [b"1", b"1"]


async def test_a_file_that_grows_while_it_is_read_is_bounded(tree: Tree) -> None:
    await tree.write("file", b"x" * 1000)
    with pytest.raises(LimitReached, match="1000 bytes"):
        await tree.read("file", limit_bytes=999)


async def test_a_full_disk_is_said_and_leaves_the_old_file() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * (1 << 20)

    async with Sandbox.create(limits=Limits(tmp_bytes=8 << 20)) as sandbox:
        await sandbox.files.write("/tmp/file", b"old")
        with pytest.raises(StorageFull):
            await sandbox.files.write("/tmp/file", endless())
        with pytest.raises(StorageFull):
            await sandbox.files.write("/tmp/file", b"x" * (9 << 20))
        assert await sandbox.files.read("/tmp/file") == b"old"
        assert len(await sandbox.files.list("/tmp")) == 1


async def test_a_tree_that_is_closed_says_so_and_closes_once(workspace: Path) -> None:
    tree = Tree.at(str(workspace))
    fd = tree.root_fd
    tree.close()
    tree.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(SandboxLost):
        await tree.read("file")


async def test_closing_waits_for_whoever_is_at_work(workspace: Path) -> None:
    tree = Tree.at(str(workspace))
    at_work, go_on = threading.Event(), threading.Event()

    def work(root_fd: int) -> int:
        at_work.set()
        assert go_on.wait(10)
        return os.fstat(root_fd).st_ino

    working = asyncio.ensure_future(tree.examine(work))
    await asyncio.to_thread(at_work.wait, 10)
    tree.close()
    go_on.set()
    assert await working == workspace.stat().st_ino
    assert tree.root_fd == -1


async def test_a_cancelled_call_leaves_no_descriptor_open(tree: Tree) -> None:
    await tree.write("file", b"x" * 1000)
    before = _descriptors()

    async def streamed() -> None:
        async for _ in tree.stream("file"):
            await asyncio.sleep(1000)

    for steps in range(15):
        task = asyncio.ensure_future(streamed())
        for _ in range(steps):
            await asyncio.sleep(0.0005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    deadline = asyncio.get_running_loop().time() + 5
    while len(_descriptors()) > len(before):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


async def test_errors_name_the_path_and_cut_a_long_one(tree: Tree) -> None:
    with pytest.raises(NotFound, match="'gone'"):
        await tree.stat("gone")
    with pytest.raises(NotFound) as missing:
        await tree.stat("x/" * 1000)
    assert len(missing.value.message) < 300


async def test_a_missing_folder_is_made_and_another_users_is_refused(tmp_path: Path) -> None:
    Tree.at(str(tmp_path / "a" / "b")).close()
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for wrong in ("file", "link"):
        with pytest.raises(InvalidRequest):
            Tree.at(str(tmp_path / wrong))
    if os.geteuid() != 0:
        with pytest.raises(InvalidRequest):
            Tree.at("/usr")


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}
