"""Each lack on a machine gets the fix for that machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from skep.app import doctor, fixes
from skep.app.doctor import Check
from skep.config import Environment, Paths, Settings
from skep.sandbox.containers.orphans import Orphan
from skep.sandbox.mechanisms import DEFAULT_ENGINE
from skep.sandbox.probe import Bwrap, Cgroups, Host, Trial, UserNamespaces

DEBIAN = Host("debian", (), "12", "Debian GNU/Linux 12", None)
UBUNTU = Host("ubuntu", ("debian",), "24.04", "Ubuntu 24.04 LTS", None)
FEDORA = Host("fedora", (), "42", "Fedora Linux 42", None)
UNKNOWN = Host("void", (), "", "Void Linux", None)
DOCKER = Host("debian", (), "12", "Debian GNU/Linux 12", "docker")
KUBERNETES = Host("debian", (), "12", "Debian GNU/Linux 12", "kubernetes")
REFUSED = Trial("map", "Operation not permitted")
WORKING = Bwrap(Path("/usr/bin/bwrap"), "system", (0, 11, 0), is_setuid=False, trial=Trial())
BROKEN = Bwrap(Path("/opt/bwrap"), "wheel", (0, 11, 0), is_setuid=False, trial=Trial("run", "No permissions"))


def namespaces(
    trial: Trial = REFUSED, *, clone: int | None = None, most: int | None = 1000, apparmor: bool = False
) -> UserNamespaces:
    return UserNamespaces(trial, clone, most, apparmor_restricts=apparmor)


def test_user_namespaces_that_work_need_no_fix() -> None:
    check = doctor.check_user_namespaces(namespaces(Trial()), DEBIAN, WORKING)
    assert (check.status, check.fix) == ("ok", "")


def test_ubuntus_apparmor_restriction_is_named_with_a_profile_for_our_bwrap() -> None:
    check = doctor.check_user_namespaces(namespaces(apparmor=True), UBUNTU, BROKEN)
    assert (check.status, check.found) == ("missing", "AppArmor restricts them")
    assert "profile skep-bwrap /opt/bwrap flags=(unconfined)" in check.fix
    assert "apparmor_parser -r" in check.fix


def test_with_such_a_profile_in_place_all_is_well() -> None:
    assert doctor.check_user_namespaces(namespaces(apparmor=True), UBUNTU, WORKING).status == "ok"


@pytest.mark.parametrize(
    ("found", "host", "words"),
    [
        (namespaces(most=0), DEBIAN, "user.max_user_namespaces=15000"),
        (namespaces(clone=0), DEBIAN, "kernel.unprivileged_userns_clone=1"),
        (namespaces(), DOCKER, "--security-opt seccomp=unconfined"),
        (namespaces(), KUBERNETES, "procMount: Unmasked"),
        (namespaces(), DEBIAN, "CONFIG_USER_NS"),
    ],
)
def test_each_reason_against_user_namespaces_has_its_fix(found: UserNamespaces, host: Host, words: str) -> None:
    check = doctor.check_user_namespaces(found, host, None)
    assert check.status == "missing"
    assert words in check.fix
    assert "Operation not permitted" in check.found


def test_seccomp_is_essential() -> None:
    assert doctor.check_seccomp(supported=True).status == "ok"
    assert doctor.check_seccomp(supported=False).status == "missing"


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (Cgroups("v2", "subtree", ("cpu", "memory", "pids")), "ok"),
        (Cgroups("v2", "subtree", ("pids",)), "degraded"),
        (Cgroups("v2", "systemd", ()), "ok"),
        (Cgroups("v1", "v1", ("cpu", "memory", "pids")), "ok"),
        (Cgroups("hybrid", "v1", ("cpu",)), "degraded"),
        (Cgroups("v2", "none", ("cpu", "memory", "pids")), "degraded"),
        (Cgroups("none", "none", ()), "degraded"),
    ],
)
def test_cgroups_are_judged_by_what_may_be_written(found: Cgroups, status: str) -> None:
    for host in (DEBIAN, DOCKER, KUBERNETES):
        check = doctor.check_cgroups(found, host)
        assert check.status == status
        assert bool(check.fix) == (status != "ok")


def test_a_missing_overlay_only_slows_things_down() -> None:
    assert doctor.check_overlay(Trial(), DEBIAN).status == "ok"
    assert doctor.check_overlay(Trial("overlay", "No such device"), DEBIAN).fix == "sudo modprobe overlay"
    assert "volume" in doctor.check_overlay(Trial("overlay", "Invalid argument"), DOCKER).fix
    assert "5.11" in doctor.check_overlay(Trial("overlay", "Operation not permitted"), DEBIAN).fix


def test_the_way_workspaces_lie_over_their_snapshot_is_told_apart() -> None:
    user = doctor.judge_layering("overlay", "auto", as_root=False, host=DEBIAN)
    root = doctor.judge_layering("overlay", "auto", as_root=True, host=DEBIAN)
    copies = doctor.judge_layering("none", "auto", as_root=False, host=DEBIAN)
    assert (user.status, "ordinary user" in user.found) == ("ok", True)
    assert (root.status, "idmapped" in root.found) == ("ok", True)
    assert (copies.status, "copies" in copies.found, "5.11" in copies.fix) == ("degraded", True, True)
    assert "volume" in doctor.judge_layering("none", "auto", as_root=True, host=DOCKER).fix


def test_copies_that_are_wanted_are_well_and_overlays_that_are_refused_are_not() -> None:
    assert doctor.judge_layering("overlay", "copy", as_root=False, host=DEBIAN).status == "ok"
    refused = doctor.judge_layering("none", "overlay", as_root=True, host=DEBIAN)
    assert (refused.status, "workspace.layering" in refused.fix) == ("missing", True)


def test_containers_that_are_left_are_counted_the_first_named_and_all_removed() -> None:
    left = [Orphan(f"{number}" * 64, f"sandbox-{number}", {}) for number in range(9)]
    check = doctor.judge_containers(left, DEFAULT_ENGINE)
    assert check.found.startswith(f"9 at {DEFAULT_ENGINE}")
    assert check.found.endswith("4 more")
    assert [one.sandbox_id in check.found for one in left] == [True] * 5 + [False] * 4
    command, _, _ = check.fix.partition(", ")
    assert command.split() == ["docker", "rm", "-fv", *(one.container_id[:12] for one in left)]


def test_what_templates_are_built_with_is_named() -> None:
    assert "Node 20.1.0 with npm" in doctor.judge_templates(["3.11.2"], "v20.1.0", DEBIAN).found
    without = doctor.judge_templates(["3.13.1", "3.11.2"], "", DEBIAN)
    assert (without.status, "Python 3.13.1, 3.11.2" in without.found) == ("ok", True)
    assert doctor.judge_templates([], "", DEBIAN).fix == "sudo apt-get install python3"


def test_landlock_is_reported_by_its_abi() -> None:
    assert doctor.check_landlock(7).status == "ok"
    assert "ABI 7" in doctor.check_landlock(7).found
    assert [doctor.check_landlock(abi).status for abi in (0, 1)] == ["degraded", "degraded"]


@pytest.mark.parametrize(
    ("host", "command"),
    [
        (DEBIAN, "sudo apt-get install bubblewrap"),
        (UBUNTU, "sudo apt-get install bubblewrap"),
        (FEDORA, "sudo dnf install bubblewrap"),
        (UNKNOWN, "package manager of Void Linux"),
    ],
)
def test_a_missing_bwrap_is_installed_as_the_distribution_does_it(host: Host, command: str) -> None:
    check = doctor.check_bwrap(None, host)
    assert check.status == "missing"
    assert command in check.fix


def test_a_setuid_bwrap_is_refused() -> None:
    found = Bwrap(Path("/usr/bin/bwrap"), "system", (), is_setuid=True, trial=Trial("setuid", "refused"))
    check = doctor.check_bwrap(found, DEBIAN)
    assert (check.status, "chmod u-s" in check.fix) == ("missing", True)


def test_a_bwrap_that_does_not_run_is_missing_and_an_old_one_degraded() -> None:
    assert doctor.check_bwrap(BROKEN, DEBIAN).status == "missing"
    assert "--security-opt" in doctor.check_bwrap(BROKEN, DOCKER).fix
    old = Bwrap(Path("/usr/bin/bwrap"), "system", (0, 8, 0), is_setuid=False, trial=Trial())
    assert doctor.check_bwrap(old, DEBIAN).status == "degraded"
    assert doctor.check_bwrap(WORKING, DEBIAN).status == "ok"


def test_one_missing_thing_makes_skep_unusable_and_a_degraded_one_does_not() -> None:
    assert doctor.is_usable([Check("a", "ok", ""), Check("b", "degraded", "", "x")])
    assert not doctor.is_usable([Check("a", "ok", ""), Check("b", "missing", "", "x")])


def test_the_room_is_measured_where_the_state_will_be(tmp_path: Path) -> None:
    check = doctor.check_disk(tmp_path / "not" / "there" / "yet")
    assert f"at {tmp_path}" in check.found


def test_no_model_at_all_is_degraded_with_the_file_to_change(tmp_path: Path) -> None:
    paths = Paths.of({"HOME": str(tmp_path)})
    (check,) = doctor.check_models(Settings(), Environment(paths, {}))
    assert (check.status, str(paths.config) in check.fix) == ("degraded", True)


def test_installing_is_spelled_for_derivatives_by_their_family() -> None:
    mint = Host("linuxmint", ("ubuntu", "debian"), "22", "Linux Mint 22", None)
    assert fixes.install("x", mint) == "sudo apt-get install x"
