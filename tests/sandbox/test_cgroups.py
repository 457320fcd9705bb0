"""Control groups as this machine has them, and as planted mount tables describe others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from skep.errors import InvalidRequest, SandboxUnusable
from skep.sandbox.cgroups import Group, Place
from skep.sandbox.hierarchy import own_folder
from skep.sandbox.limits import Limits


class Planted:
    """A /proc/self with a mount table, and folders that list this process as the kernel would."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.mounts = folder / "mounts"
        self.proc.mkdir()

    def describe(self, groups: str, *mounts: tuple[str, str, str]) -> None:
        """Write the tables; a mount is which part of the hierarchy it shows, its name, and kind and options."""
        lines = [f"30 20 0:27 {root} {self.mounts}/{name} rw - {kind}" for root, name, kind in mounts]
        (self.proc / "cgroup").write_text(groups)
        (self.proc / "mountinfo").write_text("\n".join(lines))

    def group(self, path: str, *, member: int | None = None) -> Path:
        folder = self.mounts / path
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").write_text(f"1\n{member or os.getpid()}\n")
        return folder


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path)


def test_a_controller_is_found_where_several_are_mounted_together(planted: Planted) -> None:
    planted.describe("4:cpu,cpuacct:/user\n", ("/", "cpu,cpuacct", "cgroup cgroup rw,cpu,cpuacct"))
    assert own_folder("cpu", planted.proc) is None
    group = planted.group("cpu,cpuacct/user")
    assert own_folder("cpu", planted.proc) == group
    assert own_folder("cpuset", planted.proc) is None


def test_a_container_that_sees_only_its_part_of_the_hierarchy_finds_itself(planted: Planted) -> None:
    planted.describe("4:memory:/docker/abc\n", ("/docker/abc", "memory", "cgroup cgroup rw,memory"))
    group = planted.group("memory")
    assert own_folder("memory", planted.proc) == group


def test_a_group_outside_of_what_is_mounted_is_not_found(planted: Planted) -> None:
    planted.describe("0::/system.slice/other\n", ("/docker/abc", "unified", "cgroup2 cgroup2 rw"))
    planted.group("unified")
    assert own_folder("", planted.proc) is None


def test_a_folder_that_does_not_list_this_process_is_not_its_group(planted: Planted) -> None:
    planted.describe("0::/\n", ("/", "unified", "cgroup2 cgroup2 rw"))
    group = planted.group("unified", member=os.getpid() + 1)
    assert own_folder("", planted.proc) is None
    (group / "cgroup.procs").write_text(str(os.getpid()))
    assert own_folder("", planted.proc) == group


def test_a_mount_point_with_a_space_is_found(planted: Planted) -> None:
    planted.describe("0::/\n", ("/", r"my\040groups", "cgroup2 cgroup2 rw"))
    group = planted.group("my groups")
    assert own_folder("", planted.proc) == group


def test_a_machine_without_control_groups_has_none(planted: Planted) -> None:
    assert own_folder("", planted.proc) is None
    planted.describe("", ("/", "unified", "ext4 /dev/vda rw"))
    assert own_folder("memory", planted.proc) is None


def test_a_controller_that_was_taken_away_stops_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "pids.max").touch()
    group = Group("v2", {"": (str(tmp_path), tmp_path.stat().st_ino)})
    with pytest.raises(SandboxUnusable, match=r"memory\.max cannot be set to .* No such file"):
        group.limit(Limits())
    assert not (tmp_path / "memory.max").exists()


@pytest.mark.parametrize(
    "wrong",
    [Limits(memory_bytes=-1), Limits(memory_bytes=0), Limits(processes=0), Limits(cpus=0), Limits(cpus=float("nan"))],
)
def test_no_number_means_no_limit(wrong: Limits) -> None:
    with pytest.raises(InvalidRequest, match="a sandbox cannot have"):
        Group("none", {}).limit(wrong)


def test_a_group_is_made_in_all_its_places_or_in_none(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    place = Place("v1", {"memory": f"{tmp_path}/memory", "pids": f"{tmp_path}/missing"})
    with pytest.raises(SandboxUnusable, match="cannot be made"):
        Group.plan(place).made()
    assert list((tmp_path / "memory").iterdir()) == []


def test_a_group_whose_name_was_taken_by_another_folder_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "skep-1"
    folder.mkdir()
    assert Group("v2", {"": (str(folder), folder.stat().st_ino + 1)}).remove()
    assert folder.exists()


@pytest.fixture
def v1() -> Place:
    place = Place.find()
    if place.way != "v1":
        pytest.skip("needs version 1 of control groups, writable; the guest's tests are those of version 2")
    return place


@contextlib.contextmanager
def made(place: Place) -> Iterator[Group]:
    group = Group.plan(place).made()
    try:
        yield group
    finally:
        assert group.remove(wait_s=2.0)


def read(group: Group, controller: str, name: str) -> str:
    return Path(group.folders[controller][0], name).read_text().strip()


def test_all_limits_are_written_in_version_1(v1: Place) -> None:
    with made(v1) as group:
        group.limit(Limits(memory_bytes=64 << 20, processes=33, cpus=1.5))
        assert read(group, "memory", "memory.limit_in_bytes") == str(64 << 20)
        assert "oom_kill_disable 0" in read(group, "memory", "memory.oom_control")
        assert read(group, "pids", "pids.max") == "33"
        assert read(group, "cpu", "cpu.cfs_quota_us") == "150000"
        if Path(group.folders["memory"][0], "memory.memsw.limit_in_bytes").exists():
            assert read(group, "memory", "memory.memsw.limit_in_bytes") == str(64 << 20)


def test_a_parent_that_never_kills_for_memory_does_not_pass_that_on(v1: Place) -> None:
    with made(v1) as outer:
        Path(outer.folders["memory"][0], "memory.oom_control").write_text("1")
        with made(Place("v1", {name: folder for name, (folder, _) in outer.folders.items()})) as group:
            assert "oom_kill_disable 1" in read(group, "memory", "memory.oom_control")
            group.limit(Limits())
            assert "oom_kill_disable 0" in read(group, "memory", "memory.oom_control")


def test_a_parent_with_less_processor_time_holds_in_version_1(v1: Place) -> None:
    with made(v1) as outer:
        outer.limit(Limits(cpus=0.5))
        with made(Place("v1", {name: folder for name, (folder, _) in outer.folders.items()})) as group:
            group.limit(Limits(cpus=2))
            assert read(group, "cpu", "cpu.cfs_quota_us") == "-1"
            group.limit(Limits(cpus=0.25))
            assert read(group, "cpu", "cpu.cfs_quota_us") == "25000"


def test_a_limit_that_the_kernel_refuses_is_an_error_in_version_1(v1: Place) -> None:
    with made(v1) as group, pytest.raises(SandboxUnusable, match=r"pids\.max cannot be set to 1000000000"):
        group.limit(Limits(processes=10**9))
