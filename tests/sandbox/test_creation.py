"""The ways to make a sandbox, and its workspace."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from skep.errors import InvalidRequest
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox


async def test_it_can_be_awaited_entered_and_entered_without_asyncio(tmp_path: Path) -> None:
    made = await Sandbox.create()
    assert (await made.run("echo 1")).stdout == b"1\n"
    await made.stop()
    async with Sandbox.create() as entered:
        assert (await entered.run("echo 2")).stdout == b"2\n"
    with Sandbox.create() as blocking:
        assert blocking.run("echo 3").stdout == b"3\n"


def test_the_package_offers_it() -> None:
    import skep

    assert skep.Sandbox is Sandbox


def test_importing_the_package_does_not_load_it() -> None:
    text = "import sys, skep; print([name for name in sys.modules if name.startswith('skep.')])"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True).stdout == "[]\n"


def test_nothing_is_made_before_it_is_asked_for(tmp_path: Path) -> None:
    Sandbox.create(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_is_made_kept_and_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "workspace"
    async with Sandbox.create(folder) as sandbox:
        await sandbox.run("echo kept > file; mkdir .hidden; chmod 700 .hidden; echo x > .hidden/file")
    assert (folder / "file").read_text() == "kept\n"
    async with Sandbox.create(str(folder)) as sandbox:
        assert (await sandbox.run("cat file .hidden/file; echo more >> file")).stdout == b"kept\nx\n"
        assert await sandbox.files.read("file") == b"kept\nmore\n"


async def test_without_a_folder_the_workspace_goes_with_the_sandbox() -> None:
    async with Sandbox.create() as sandbox:
        folder = Path(tempfile.gettempdir()) / f"skep-workspace-{sandbox.id}"
        await sandbox.run("mkdir -p a/b; touch a/b/c; chmod 000 a/b; ln -s /etc link")
        assert folder.is_dir()
    assert not folder.exists()


async def test_two_sandboxes_may_work_in_one_folder(tmp_path: Path) -> None:
    async with Sandbox.create(tmp_path / "w") as one, Sandbox.create(tmp_path / "w") as other:
        await one.run("echo shared > file")
        assert (await other.run("cat file && echo more >> file")).stdout == b"shared\n"
        assert (await one.run("cat file; touch /tmp/mine")).stdout == b"shared\nmore\n"
        assert not (await other.run("test -e /tmp/mine")).ok


async def test_a_workspace_is_private_on_the_host(tmp_path: Path) -> None:
    async with Sandbox.create(tmp_path / "w"):
        assert (tmp_path / "w").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("wrong", ["file", "link", "file/below", "nul\0", "x" * 300])
async def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(InvalidRequest):
        await Sandbox.create(f"{tmp_path}/{wrong}")


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandboxes run as that user")
async def test_files_of_root_are_handed_over_only_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    (folder / "file").write_text("root's")
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequest, match="adopt"):
        try:
            await Sandbox.create(folder)
        except InvalidRequest as refused:
            raise InvalidRequest(f"{refused.message}: {refused.hint}") from refused
    before = Path("/etc/passwd").stat().st_uid
    async with Sandbox.create(folder, adopt=True) as sandbox:
        assert (await sandbox.run("cat file && echo more >> file")).stdout == b"root's"
    assert Path("/etc/passwd").stat().st_uid == before
    async with Sandbox.create(folder) as sandbox:  # from now on the folder is a sandbox's
        assert (await sandbox.run("cat file")).ok


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use any folder")
async def test_a_folder_of_another_user_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        await Sandbox.create("/usr/share")


async def test_its_environment_is_there_for_every_command() -> None:
    async with Sandbox.create(env={"MINE": "1", "HOME": "/tmp"}) as sandbox:
        assert (await sandbox.run("echo $MINE $HOME")).stdout == b"1 /tmp\n"
        assert (await sandbox.run("echo $MINE $HOME", env={"MINE": "2"})).stdout == b"2 /tmp\n"
        assert (await (await sandbox.shell()).run("echo $MINE")).stdout == b"1\n"


@pytest.mark.parametrize(
    "limits", [Limits(memory_bytes=0), Limits(processes=-1), Limits(cpus=0), Limits(disk_bytes=-5)], ids=repr
)
async def test_a_limit_that_is_none_is_refused(limits: Limits) -> None:
    with pytest.raises(InvalidRequest):
        await Sandbox.create(limits=limits)


async def test_many_are_made_at_once() -> None:
    made = await asyncio.gather(*(_awaited(Sandbox.create()) for _ in range(10)))
    assert len({sandbox.id for sandbox in made}) == 10
    await asyncio.gather(*(sandbox.stop() for sandbox in made))


async def _awaited(creation: object) -> Sandbox:
    return await creation  # type: ignore[misc, no-any-return]
