"""What of the host a sandbox sees."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skep.errors import InvalidRequest
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox

MIB = 1 << 20


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox.create() as made:
        yield made


async def test_the_root_holds_the_system_and_the_sandboxs_own_folders(sandbox: Sandbox) -> None:
    names = set((await sandbox.run("ls -A /")).text.split())
    system = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"}
    assert {"usr", "etc", "proc", "dev", "tmp", "cache", "run", "workspace"} <= names
    assert names - system <= {"etc", "proc", "dev", "tmp", "cache", "run", "workspace"}


@pytest.mark.parametrize(
    "path",
    ["/etc/shadow", "/etc/machine-id", "/etc/ssh", "/etc/sudoers", "/etc/resolv.conf", "/root", "/home", "/var", "/sys",
     "/boot", "/srv", "/media", "/etc/ssl/private", "/etc/environment", "/etc/fstab", "/etc/crontab"],
)  # fmt: skip
async def test_nothing_that_tells_of_the_host_is_there(sandbox: Sandbox, path: str) -> None:
    assert not (await sandbox.run(["test", "-e", path])).ok


async def test_users_groups_and_names_are_made_up(sandbox: Sandbox) -> None:
    for path in ("/etc/passwd", "/etc/group"):
        text = (await sandbox.files.read(path)).decode()
        assert [line.split(":")[0] for line in text.splitlines()][:2] == ["root", "agent"]
        assert len(text.splitlines()) == 3
    assert (await sandbox.run("hostname; cat /etc/hostname; getent hosts localhost")).text.split()[:2] == ["skep"] * 2


@pytest.mark.parametrize("path", ["/", "/usr", "/usr/bin", "/etc", "/bin", "/run", "/run/skep", "/dev", "/proc"])
async def test_the_system_cannot_be_written(sandbox: Sandbox, path: str) -> None:
    assert not (await sandbox.run(["touch", f"{path}/new"])).ok
    assert not (await sandbox.run(["touch", f"{path}/new"], user="root")).ok


async def test_devices_are_few_and_harmless(sandbox: Sandbox) -> None:
    names = set((await sandbox.run("ls -A /dev")).text.split())
    assert {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm"} <= names
    assert names <= {
        "null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "fd", "stdin", "stdout", "stderr",
        "core", "console",
    }  # fmt: skip
    assert not (await sandbox.run("find / -xdev -type b 2>/dev/null | grep .")).ok


async def test_its_own_folders_have_the_sizes_asked_for() -> None:
    limits = Limits(tmp_bytes=8 * MIB, cache_bytes=16 * MIB, shm_bytes=4 * MIB)
    async with Sandbox.create(limits=limits) as sandbox:
        for place, size in (("/tmp", 8 * MIB), ("/cache", 16 * MIB), ("/dev/shm", 4 * MIB)):
            shown = await sandbox.run(["df", "--output=size", "-B1", place])
            assert int(shown.text.split()[1]) == size
            filled = await sandbox.run(f"cat /dev/zero > {place}/full")
            assert not filled.ok
            assert "No space left" in filled.error_text
            assert (await sandbox.files.stat(f"{place}/full")).size <= size


async def test_ordinary_programs_work(sandbox: Sandbox) -> None:
    result = await sandbox.run("date && ls -l /usr | head -1 && sort </etc/passwd && locale && echo hi | grep h && ps")
    assert result.ok, result.error_text
    assert "hi" in result.text


async def test_more_of_the_host_is_shown_read_only_where_asked(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "tool").write_text("#!/bin/sh\necho tool ran\n")
    (tmp_path / "tool").chmod(0o755)
    async with Sandbox.create(read_only={str(tmp_path): "/opt/tools", "/etc/hosts": "/opt/hosts"}) as sandbox:
        assert (await sandbox.run(["/opt/tools/tool"])).stdout == b"tool ran\n"
        assert not (await sandbox.run("echo x > /opt/tools/new")).ok
        assert (await sandbox.run(["cat", "/opt/hosts"])).stdout == Path("/etc/hosts").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["tool"]


@pytest.mark.parametrize(
    "place", ["/workspace", "/workspace/x", "/tmp/x", "/cache", "/dev/x", "/proc/x", "/", "relative", "/opt/../tmp/x"]
)
async def test_nothing_is_shown_where_the_agent_could_write(tmp_path: Path, place: str) -> None:
    with pytest.raises(InvalidRequest, match="nothing can be mounted"):
        await Sandbox.create(read_only={str(tmp_path): place})


async def test_what_is_not_there_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        await Sandbox.create(read_only={str(tmp_path / "nowhere"): "/opt/tools"})


async def test_a_folder_that_only_its_owner_can_reach_is_shown_too(tmp_path: Path) -> None:
    (tmp_path / "shut" / "data").mkdir(parents=True)
    (tmp_path / "shut" / "data" / "file").write_text("shown")
    (tmp_path / "shut").chmod(0o700)
    async with Sandbox.create(read_only={str(tmp_path / "shut" / "data"): "/opt/data"}) as sandbox:
        assert (await sandbox.run(["cat", "/opt/data/file"])).stdout == b"shown"
        assert not (await sandbox.run(["touch", "/opt/data/new"])).ok


async def test_more_than_can_be_shown_is_refused_and_not_a_riddle(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for number in range(40):
        (tmp_path / str(number)).mkdir()
    shown = {str(tmp_path / str(number)): f"/opt/{number}" for number in range(40)}
    if os.geteuid() == 0:
        with pytest.raises(InvalidRequest, match="descriptors"):
            await Sandbox.create(read_only=shown)
    else:
        async with Sandbox.create(read_only=shown) as sandbox:
            assert len((await sandbox.run("ls /opt")).text.split()) == 40


async def test_each_sandbox_has_a_user_of_its_own_on_the_host_when_root_makes_it() -> None:
    if os.geteuid() != 0:
        pytest.skip("an ordinary user has one uid, and all its sandboxes with it")
    async with Sandbox.create() as one, Sandbox.create() as other:
        uids = set()
        for sandbox in (one, other):
            await sandbox.run("touch file")
            uids.add(os.stat("workspace/file", dir_fd=sandbox.files.root_fd).st_uid)  # type: ignore[attr-defined]
        assert len(uids) == 2
        assert min(uids) >= 0x70000000
