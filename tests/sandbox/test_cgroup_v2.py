"""Version 2 of control groups, on a kernel that has it: a small guest is booted once, and says what it saw.

`guest/boot.py` boots it; `guest/bare.py` and `guest/under_systemd.py` are what runs inside.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.beside import Ran
from tests.sandbox.guest import boot

pytestmark = pytest.mark.guest

Said = dict[str, dict[str, Any]]
EVERYTHING = ["cpu", "memory", "pids"]


@pytest.fixture(scope="session")
def guest(found_beside: Callable[[str], Ran]) -> Said:
    """Give what each trial in the guest found, by name. One guest serves all workers of the session."""
    ran = found_beside(boot.__name__)
    if ran.returncode == boot.MISSING and not os.environ.get("CI"):
        pytest.skip(ran.stderr.strip())
    if ran.returncode != 0:
        pytest.fail(f"the guest did not boot: {ran.stderr}")
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return {line["trial"]: line for line in lines}


@pytest.fixture
def under_systemd(guest: Said) -> Said:
    if "systemd" not in guest:
        pytest.skip("this machine has no systemd with a user's bus to boot; install systemd and dbus-user-session")
    return guest


def test_a_delegated_group_is_used(guest: Said) -> None:
    found = guest["limits"]
    assert (found["way"], found["controllers"]) == ("v2", EVERYTHING)


def test_the_controller_moves_to_a_leaf_of_its_own(guest: Said) -> None:
    found = guest["limits"]
    assert found["after"] == found["before"] + "/skep-controller"


def test_all_limits_are_written(guest: Said) -> None:
    assert guest["limits"]["files"] == {
        "memory.max": str(48 << 20),
        "memory.swap.max": "0",
        "memory.oom.group": "0",
        "pids.max": "40",
        "cpu.max": "50000 100000",
    }


def test_a_memory_bomb_is_named(guest: Said) -> None:
    assert guest["limits"]["memory"] == ["memory", 137]


def test_a_memory_bomb_takes_nobody_else_with_it(guest: Said) -> None:
    assert guest["limits"]["bystander_ended"] is False
    assert guest["limits"]["afterwards"] == "still here\n"


def test_a_fork_bomb_is_named(guest: Said) -> None:
    limit, code, said = guest["limits"]["forks"]
    assert (limit, code) == ("processes", 11)
    assert "Resource temporarily unavailable" in said


def test_a_busy_loop_is_throttled(guest: Said) -> None:
    assert guest["limits"]["throttled"] > 0


def test_a_stopped_sandbox_leaves_no_group(guest: Said) -> None:
    assert guest["limits"]["inside"] > 0
    assert guest["limits"]["folder_left"] is False
    assert guest["limits"]["left"] == []


def test_a_limit_that_the_kernel_refuses_stops_the_sandbox_and_leaves_no_group(guest: Said) -> None:
    kind, message = guest["refused"]["too many"]
    assert kind == "SandboxUnusable"
    assert "pids.max cannot be set to 1000000000: Invalid argument" in message
    assert guest["refused"]["no limit"][0] == "InvalidRequest"
    assert guest["refused"]["left"] == []


def test_threads_and_children_find_the_same_place(guest: Said) -> None:
    found = guest["sharing"]
    (place,) = found["places"]
    assert json.loads(place)[""] + "/skep-controller" == found["child"]["after"]
    assert found["child"]["way"] == "v2"


def test_everything_inside_dies_with_a_killed_controller(guest: Said) -> None:
    assert guest["killed"]["inside"] > 1
    assert guest["killed"]["gone"] is True


def test_the_next_controller_removes_the_group_of_a_killed_one(guest: Said) -> None:
    assert guest["killed"]["folder"] is True
    assert guest["swept"]["swept"] >= 1
    assert guest["after the sweep"]["folder"] is False


def test_without_delegation_the_watcher_stands_in(guest: Said) -> None:
    found = guest["undelegated"]
    assert found["way"] == "none"
    assert found["memory"] == ["memory", 137]


@pytest.mark.parametrize("trial", ["undelegated", "crowded", "no memory", "read-only"])
def test_a_group_that_is_not_ours_to_divide_is_left_alone(guest: Said, trial: str) -> None:
    found = guest[trial]
    assert found["way"] == "none"
    assert found["after"] == found["before"]


def test_memory_and_processes_are_limited_where_the_processor_cannot_be(guest: Said) -> None:
    found = guest["no cpu"]
    assert (found["way"], found["controllers"]) == ("v2", ["memory", "pids"])
    assert found["memory"] == ["memory", 137]
    assert "cpu.max" not in found["files"]


def test_root_in_the_root_of_all_groups_needs_no_leaf(guest: Said) -> None:
    found = guest["root of all"]
    assert found["way"] == "v2"
    assert found["after"] == found["before"] == "/sys/fs/cgroup"
    assert found["memory"] == ["memory", 137]


def test_a_login_session_gets_a_scope_from_the_users_systemd(under_systemd: Said) -> None:
    found = under_systemd["session"]
    assert found["before"].endswith("/user-1000.slice/session-1.scope")
    assert "/user@1000.service/app.slice/skep-" in found["after"]
    assert found["after"].endswith(".scope/skep-controller")
    assert (found["way"], found["controllers"]) == ("v2", EVERYTHING)
    assert found["memory"] == ["memory", 137]
    assert found["bystander_ended"] is False


@pytest.mark.parametrize("trial", ["session of root", "user's scope"])
def test_other_sessions_get_a_scope_too(under_systemd: Said, trial: str) -> None:
    found = under_systemd[trial]
    assert (found["way"], found["controllers"]) == ("v2", EVERYTHING)
    assert Path(found["after"]).parent.name.startswith("skep-")


@pytest.mark.parametrize("trial", ["delegated service", "user's delegated service"])
def test_a_service_with_delegation_stays_in_its_group(under_systemd: Said, trial: str) -> None:
    found = under_systemd[trial]
    assert found["way"] == "v2"
    assert found["after"] == found["before"] + "/skep-controller"


@pytest.mark.parametrize("trial", ["service", "service of root", "user's service"])
def test_a_service_without_delegation_is_neither_divided_nor_left(under_systemd: Said, trial: str) -> None:
    found = under_systemd[trial]
    assert found["way"] == "none"
    assert found["after"] == found["before"]


def test_a_session_whose_user_has_no_manager_stays_where_it_is(under_systemd: Said) -> None:
    found = under_systemd["session without a manager"]
    assert found["way"] == "none"
    assert found["after"] == found["before"]
