"""Probes find out what the kernel allows by trying, and read the marks that systems leave."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from skep.sandbox import probe
from skep.sandbox.probe import Host, Trial


def plant(root: Path, **files: str) -> Path:
    """Write files below a root; a double underscore stands for a slash, a single one stays."""
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def namespaces() -> list[Path]:
    return [Path(f"/proc/self/ns/{kind}").readlink() for kind in ("user", "mnt")]


def test_user_namespaces_agree_with_the_systems_own_tool() -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare(1) is not installed; it comes with util-linux")
    own = subprocess.run([unshare, "--user", "--map-root-user", "--mount", "true"], capture_output=True, check=False)
    assert probe.user_namespaces().trial.worked == (own.returncode == 0)


def test_a_trial_leaves_this_process_where_it_was() -> None:
    before = namespaces()
    probe.user_namespaces()
    probe.overlay()
    assert namespaces() == before


def test_the_sysctls_that_forbid_user_namespaces_are_read(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        proc__sys__kernel__unprivileged_userns_clone="0\n",
        proc__sys__user__max_user_namespaces="0\n",
        proc__sys__kernel__apparmor_restrict_unprivileged_userns="1\n",
    )
    found = probe.user_namespaces(root)
    assert (found.clone_sysctl, found.most, found.apparmor_restricts) == (0, 0, True)


def test_absent_sysctls_forbid_nothing(tmp_path: Path) -> None:
    found = probe.user_namespaces(tmp_path)
    assert (found.clone_sysctl, found.most, found.apparmor_restricts) == (None, None, False)


def test_seccomp_agrees_with_what_the_kernel_lists() -> None:
    assert probe.seccomp() == Path("/proc/sys/kernel/seccomp/actions_avail").exists()


def test_landlock_is_a_small_number_or_none() -> None:
    assert 0 <= probe.landlock_abi() < 100


def test_bwrap_is_found_in_the_wheel_and_runs_when_user_namespaces_do() -> None:
    found = probe.bwrap()
    assert found is not None
    assert (found.origin, found.is_setuid) == ("wheel", False)
    assert found.version >= (0, 11)
    if probe.user_namespaces().trial.worked:
        assert found.trial.worked, found.trial


def test_a_setuid_bwrap_is_recognised_and_not_run(tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    fake.chmod(0o4755)
    found = probe.examine_bwrap(fake, "system")
    assert found.is_setuid
    assert not (tmp_path / "ran").exists()


def test_a_bwrap_that_fails_is_reported_in_its_own_words(tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo bubblewrap 0.8.0 || { echo 'bwrap: No permissions' >&2; exit 1; }\n"
    )
    fake.chmod(0o755)
    found = probe.examine_bwrap(fake, "system")
    assert (found.version, found.trial) == ((0, 8, 0), Trial("run", "bwrap: No permissions"))


def test_a_file_that_is_no_program_is_no_bwrap(tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_bytes(b"\x7fELF nonsense")
    fake.chmod(0o755)
    assert not probe.examine_bwrap(fake, "system").trial.worked


def test_an_overlay_through_bwrap_works_where_one_works_at_all() -> None:
    bwrap = probe.bwrap()
    assert probe.overlay(bwrap).worked or not probe.overlay().worked


def test_a_delegated_subtree_of_v2_is_found(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        sys__fs__cgroup__cgroup="",
        proc__self__cgroup="0::/user.slice/me\n",
    )
    group = root / "sys/fs/cgroup/user.slice/me"
    group.mkdir(parents=True)
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (group / "cgroup.controllers").write_text("cpu memory pids\n")
    assert probe.cgroups(root) == probe.Cgroups("v2", "subtree", ("cpu", "memory", "pids"))
    assert [child.name for child in group.iterdir()] == ["cgroup.controllers"]


def test_without_controllers_systemd_is_asked_for_a_scope(tmp_path: Path) -> None:
    root = plant(tmp_path, proc__self__cgroup="0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("")
    assert probe.cgroups(root).delegation == "none"
    private = root / f"run/user/{os.getuid()}/systemd/private"
    private.parent.mkdir(parents=True)
    private.write_text("")
    assert probe.cgroups(root).delegation == "systemd"


def test_v1_groups_count_when_they_can_be_made(tmp_path: Path) -> None:
    root = plant(tmp_path, proc__self__cgroup="4:memory:/box\n3:cpu,cpuacct:/\n2:pids:/gone\n")
    for name in ("memory/box", "cpu", "pids"):
        (root / "sys/fs/cgroup" / name).mkdir(parents=True)
    assert probe.cgroups(root) == probe.Cgroups("v1", "v1", ("cpu", "memory"))
    (root / "sys/fs/cgroup/unified").mkdir()
    assert probe.cgroups(root).version == "hybrid"


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert probe.cgroups(tmp_path) == probe.Cgroups("none", "none", ())


UBUNTU = 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n'


def test_the_distribution_is_read_from_os_release(tmp_path: Path) -> None:
    root = plant(tmp_path)
    (root / "etc").mkdir()
    (root / "etc/os-release").write_text(UBUNTU)
    assert probe.host(root) == Host("ubuntu", ("debian",), "24.04", "Ubuntu 24.04.1 LTS", None)
    assert probe.host(root).is_a("debian")


@pytest.mark.parametrize(
    ("mark", "text", "container"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("var/run/secrets/kubernetes.io/serviceaccount/token", "", "kubernetes"),
        ("proc/1/cgroup", "0::/kubepods.slice/pod1\n", "kubernetes"),
        ("proc/1/cgroup", "0::/init.scope\n", None),
    ],
)
def test_containers_are_known_by_their_marks(tmp_path: Path, mark: str, text: str, container: str | None) -> None:
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).write_text(text)
    assert probe.host(tmp_path).container == container


def test_a_bare_system_still_has_a_name(tmp_path: Path) -> None:
    assert probe.host(tmp_path).id == "linux"
