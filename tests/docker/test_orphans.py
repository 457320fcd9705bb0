"""Containers whose controller has died are found by their labels, and nobody else's are touched."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.docker.daemon import Daemon, daemon
from tests.docker.sibling import api_of
from tests.programs import started

from skep.app.doctor import check_containers
from skep.errors import InvalidRequest
from skep.sandbox.containers.engine import Engine
from skep.sandbox.containers.orphans import OWNER, SANDBOX, is_orphaned, labels, sweep
from skep.sandbox.sandbox import Sandbox

__all__ = ["daemon"]


def own_label() -> str:
    return labels("id", {})[OWNER]


def test_a_process_that_lives_is_no_orphans_owner() -> None:
    assert not is_orphaned(own_label())


def test_a_process_that_has_ended_is() -> None:
    boot, namespace, _, _ = own_label().split()
    with started(["sleep", "1000"]) as other:
        began = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        label = f"{boot} {namespace} {other.pid} {began}"
        assert not is_orphaned(label)
        other.kill()
    assert is_orphaned(label)


def test_a_number_that_is_another_process_by_now_is_too() -> None:
    boot, namespace, pid, began = own_label().split()
    assert is_orphaned(f"{boot} {namespace} {pid} {int(began) + 1}")


def test_what_was_before_the_machine_started_is_too() -> None:
    _, namespace, pid, began = own_label().split()
    assert is_orphaned(f"another-boot {namespace} {pid} {began}")


@pytest.mark.parametrize("label", ["", "nonsense", "a b c", "a b c d"], ids=repr)
def test_a_label_that_says_nothing_dooms_nobody(label: str) -> None:
    assert not is_orphaned(label)


def test_a_process_of_another_namespace_may_live() -> None:
    boot, namespace, pid, began = own_label().split()
    assert not is_orphaned(f"{boot} {int(namespace) + 1} {pid} {int(began) + 1}")


@pytest.mark.parametrize("given", [{"": "x"}, {"a": "x" * 5000}, {"a": "\0"}], ids=["empty", "long", "NUL"])
def test_labels_that_no_container_can_have_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        labels("id", given)


def test_what_a_caller_says_replaces_no_label_of_skeps() -> None:
    assert labels("id", {"sandbox": "other", "owner": "other"})[SANDBOX] == "id"
    assert labels("id", {"owner": "other"})[OWNER] == own_label()


@dataclass(frozen=True, slots=True)
class Scene:
    """A sandbox that lives, and beside it a container of a process that has died and one that is not Skep's."""

    sandbox: Sandbox
    left: str
    other: str


@pytest.fixture
async def scene(daemon: Daemon) -> AsyncIterator[Scene]:
    boot, namespace, _, _ = own_label().split()
    dead = f"{boot} {namespace} {os.getpid()} 1"
    async with Sandbox.create(mechanism="docker", options=daemon.options) as sandbox:
        for thread in threading.enumerate():
            if thread.name == "skep-orphans":  # the process's own first sweep, which would be faster
                await asyncio.to_thread(thread.join, 30)
        with api_of(daemon) as api:
            (image,) = {found["Image"] for found in api.containers(filters={"label": f"skep.sandbox={sandbox.id}"})}
            ours = {SANDBOX: "left", OWNER: dead, "skep.session": "ses-1", "skep.account": "bees"}
            made = [api.create_container(image, "/bin/true", labels=told)["Id"] for told in (ours, {OWNER: dead})]
            try:
                yield Scene(sandbox, *made)
            finally:
                for container_id in containers(daemon) & set(made):
                    api.remove_container(container_id, force=True)


def containers(daemon: Daemon) -> set[str]:
    with api_of(daemon) as api:
        return {found["Id"] for found in api.containers(all=True)}


@pytest.mark.service
async def test_a_sweep_removes_what_the_dead_left_and_nothing_else(daemon: Daemon, scene: Scene) -> None:
    assert await sweep(await Engine.at(daemon.host)) == ["left"]
    assert scene.left not in containers(daemon)
    assert scene.other in containers(daemon)
    assert (await scene.sandbox.run("echo fine")).ok


@pytest.mark.service
async def test_the_doctor_tells_whose_containers_are_left_and_what_removes_them(daemon: Daemon, scene: Scene) -> None:
    check = await check_containers(daemon.host)
    assert check.status == "degraded"
    assert f"1 at {daemon.host}" in check.found
    assert f"{scene.left[:12]} (account bees, session ses-1)" in check.found
    assert check.fix.startswith(f"docker -H {daemon.host} rm -fv {scene.left[:12]}, or ")
    assert scene.left in containers(daemon)
    await sweep(await Engine.at(daemon.host))
    assert (await check_containers(daemon.host)).status == "ok"
