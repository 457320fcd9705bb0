"""The sandbox contract, kept by `local` with its gaps.

The suite halts and kills all that it sees, and writes wherever it can: on a machine that somebody uses, without
isolation, that is damage. So it runs in a world that can be thrown away (`world.py`), and outside that world each
promise here is only what became of it there.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

import pytest
from tests.beside import Ran
from tests.contracts import world
from tests.contracts.world import MARK, disposable

from skep.sandbox.limits import Limits
from skep.sandbox.local import LocalSandbox, Process
from skep.sandbox.sandbox import Sandbox
from skep.testing import Gap, MakeSandbox, SandboxContract

_NO_PLACE = Gap("paths are the machine's own: the workspace is the folder, and there is no /workspace or /cache")
_NO_USER = Gap("commands are the caller's: there is no user `agent`")
_SHARED = Gap("/tmp, /dev/shm and the list of processes are the machine's")
_OPEN = Gap("nothing is read-only: files are removed as the caller could", tried=False)
_ALL = Gap("a program may halt and kill whatever the caller may, the twin and the caller too", tried=False)


class TestLocal(SandboxContract):
    gaps: ClassVar[Mapping[str, Gap]] = {
        "test_commands_start_while_a_program_halts_all_it_sees": _ALL,
        "test_places_that_are_read_only_inside_are_so_here": _OPEN,
        "test_sandboxes_know_nothing_of_each_other": _SHARED,
        "test_dots_do_not_lead_out": _NO_USER,
        "test_the_agent_is_an_ordinary_user_with_a_home": _NO_USER,
        "test_the_environment_is_clean_and_its_own": _NO_USER,
        "test_what_is_written_is_read_back_here_and_inside": _NO_PLACE,
        "test_a_path_means_what_it_means_inside[/workspace/file]": _NO_PLACE,
        "test_a_path_means_what_it_means_inside[/cache/file]": _NO_PLACE,
        "test_shells_of_one_sandbox_are_apart": _NO_PLACE,
        "test_keeps[folder]": _NO_PLACE,
        "test_a_command_works_in_the_workspace_unless_told_otherwise": _NO_PLACE,
        "test_a_list_is_run_as_it_is_and_a_text_by_the_shell": _NO_PLACE,
    }

    @pytest.fixture
    def make_sandbox(self, caplog: pytest.LogCaptureFixture) -> MakeSandbox:
        if not disposable():
            raise RuntimeError("this world cannot be thrown away")
        caplog.set_level(logging.ERROR, "skep.sandbox.local")

        def make(*, limits: Limits | None = None) -> Awaitable[Sandbox]:
            return Sandbox.create(limits=limits, mechanism="local", options={"allow_unsafe": True})

        return make

    async def destroy(self, sandbox: Sandbox) -> None:
        """Kill the twin, as the machine's out-of-memory killer might."""
        assert isinstance(sandbox, LocalSandbox) and isinstance(sandbox.housing, Process)
        guard = sandbox.housing.pid
        (twin,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        os.kill(int(twin), signal.SIGKILL)


@pytest.fixture(scope="session")
def told(found_beside: Callable[[str], Ran]) -> dict[str, ElementTree.Element]:
    """Give what became of each promise in the world."""
    ran = found_beside(world.__name__)
    assert ran.returncode == 0, ran.stderr
    return {_plain(str(case.get("name"))): case for case in ElementTree.fromstring(ran.stdout).iter("testcase")}


def _plain(name: str) -> str:
    """Return a test's name with single backslashes: pytest doubles them for each suite that has collected the test."""
    return re.sub(r"\\+", r"\\", name)


def _as_told(promise: Callable[..., None]) -> Callable[..., None]:
    """Return a test that ends as the promise did in the world."""

    def test(self: object, request: pytest.FixtureRequest, told: dict[str, ElementTree.Element], **_: object) -> None:
        case = told[_plain(request.node.name)]
        for fault in (*case.findall("failure"), *case.findall("error")):
            pytest.fail(f"{fault.get('message')}\n{fault.text}")
        if (gap := case.find("skipped")) is not None:
            end = pytest.xfail if gap.get("type") == "pytest.xfail" else pytest.skip
            end(str(gap.get("message")))

    own = [
        name for name in inspect.signature(promise).parameters if name not in ("self", "make_sandbox", "monkeypatch")
    ]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in
                  ("self", "request", "told", *own)]  # fmt: skip
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    test.pytestmark = list(getattr(promise, "pytestmark", []))  # type: ignore[attr-defined]
    return test


if not disposable():
    for name, promise in inspect.getmembers(SandboxContract, inspect.isfunction):
        if name.startswith("test_"):
            setattr(TestLocal, name, _as_told(promise))


@pytest.mark.skipif(disposable(), reason="this world can be thrown away")
def test_the_suite_runs_in_no_other_world_whatever_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "1")
    assert not disposable()
