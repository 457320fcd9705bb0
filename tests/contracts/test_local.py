"""The sandbox contract, kept by `local` with its gaps.

The suite halts and kills all that it sees, and writes wherever it can: on a machine that somebody uses, without
isolation, that is damage. So it runs in a world that can be thrown away, made with bubblewrap: a root that nobody
writes, processes, memory and network of its own, an ordinary user. Outside that world each promise here is only what
became of it there.
"""

from __future__ import annotations

import fcntl
import inspect
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

import pytest

from skep.sandbox.binary import Bwrap
from skep.sandbox.limits import Limits
from skep.sandbox.local import LocalSandbox, Process
from skep.sandbox.sandbox import Sandbox
from skep.testing import Gap, MakeSandbox, SandboxContract

ROOT = Path(__file__).parent.parent.parent
MARK = "SKEP_DISPOSABLE_WORLD"


def disposable() -> bool:
    """Say whether nothing here can be harmed."""
    sealed = all(os.statvfs(place).f_flag & os.ST_RDONLY for place in ("/", "/etc", str(ROOT)))
    first = Path("/proc/1/comm").read_text().strip()
    networks = [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    own = first == "bwrap" and networks == ["lo"] and os.getuid() != 0
    return os.environ.get(MARK) == "1" and sealed and own


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
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ElementTree.Element]:
    """Give what became of each promise in the world; one worker makes it, and the others wait."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    report = shared / "local-world.xml"
    with (shared / "local-world.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not report.exists():
            _run_in_world(report)
    return {_plain(str(case.get("name"))): case for case in ElementTree.parse(report).iter("testcase")}


def _plain(name: str) -> str:
    """Return a test's name with single backslashes: pytest doubles them for each suite that has collected the test."""
    return re.sub(r"\\+", r"\\", name)


def _run_in_world(report: Path) -> None:
    words = ["-q", "-n", "2", "-p", "no:cacheprovider", "--junitxml", "/tmp/report.xml", f"{Path(__file__)}::TestLocal"]
    with _world() as (folder, enter):
        done = subprocess.run(
            [*enter, sys.executable, "-m", "pytest", *words], capture_output=True, text=True, timeout=900
        )
        assert (folder / "report.xml").exists(), done.stdout[-5000:] + done.stderr[-5000:]
        shutil.copyfile(folder / "report.xml", report)


@contextmanager
def _world() -> Iterator[tuple[Path, list[str]]]:
    """Make a folder that is /tmp in the world, and give what to put before a command to run it there."""
    folder = Path(tempfile.mkdtemp(prefix="skep-world-", dir="/tmp"))
    folder.chmod(0o1777)
    try:
        yield folder, [
            sys.executable, str(ROOT / "scripts/as-user"), str(Bwrap.find().path),
            "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run", "--bind", str(folder), "/tmp",
            "--ro-bind", str(ROOT), str(ROOT),  # it may lie below /tmp
            "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin",
            "--setenv", "HOME", "/tmp", "--setenv", "PYTHONDONTWRITEBYTECODE", "1", "--setenv", MARK, "1",
            "--chdir", str(ROOT), "--",
        ]  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
    test.pytestmark = [*getattr(promise, "pytestmark", []), pytest.mark.timeout(900).mark]  # type: ignore[attr-defined]
    return test


if not disposable():
    for name, promise in inspect.getmembers(SandboxContract, inspect.isfunction):
        if name.startswith("test_"):
            setattr(TestLocal, name, _as_told(promise))


@pytest.mark.skipif(disposable(), reason="this world can be thrown away")
def test_the_suite_runs_in_no_other_world_whatever_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "1")
    assert not disposable()
