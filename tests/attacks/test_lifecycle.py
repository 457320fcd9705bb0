"""What a command can do to outlive its sandbox, to run while it is paused, or to leave something behind."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.attacks.attack import DEADLINE_S, PYTHON, Plain, Weakened, host_processes, outcome_in, program, soon
from tests.attacks.controller import HOSTILE

from skep.errors import SandboxLost, SandboxUnusable
from skep.sandbox.bubblewrap import BubblewrapSandbox, draw_plan
from skep.sandbox.cgroups import Group
from skep.sandbox.leftovers import Record, records_folder, sweep
from skep.sandbox.limits import Limits
from skep.sandbox.recipe import Recipe
from skep.sandbox.sandbox import Sandbox

CONTROLLER = Path(__file__).with_name("controller.py")


@pytest.fixture
def mark() -> Iterator[str]:
    """Give a word that only this test's processes carry, and end those that are left."""
    word = f"skep-attack-{secrets.token_hex(8)}"
    yield word
    for pid in host_processes(word):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _gone(mark: str, *, but: int = 0, within_s: float = DEADLINE_S) -> bool:
    """Say whether nothing with a mark is left soon, in many looks: what forks on can be missed by one."""
    looks = iter(lambda: [pid for pid in host_processes(mark) if pid != but], None)
    return await soon(lambda: not any(next(looks) for _ in range(20)), within_s)


@contextmanager
def _controller(kind: str, mark: str) -> Iterator[subprocess.Popen[str]]:
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(
        [sys.executable, str(CONTROLLER), kind, mark], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_daemon_outlives_a_plain_bwrap_that_is_killed(tmp_path: Path, mark: str) -> None:
    """The control of all that follows."""
    plain = Plain(namespaces=("--unshare-user", "--unshare-net"))
    bwrap = subprocess.Popen([*plain.command(tmp_path), PYTHON, "-c", HOSTILE["daemon"], mark])
    assert await soon((tmp_path / "up").exists, DEADLINE_S)
    bwrap.kill()
    bwrap.wait()
    assert not await _gone(mark, within_s=0.4)


@pytest.mark.parametrize("kind", HOSTILE)
async def test_nothing_outlives_a_controller_that_is_killed(kind: str, mark: str) -> None:
    with _controller(kind, mark) as process:
        assert not await _gone(mark, but=process.pid, within_s=0)
        process.kill()
        assert await _gone(mark, but=process.pid)


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind not in ("paused", "terminal")])
async def test_nothing_outlives_stop(kind: str, mark: str) -> None:
    sandbox = await Sandbox.create()
    await sandbox.start([PYTHON, "-c", HOSTILE[kind], mark])
    assert await soon(lambda: bool(host_processes(mark)), DEADLINE_S)
    await sandbox.stop()
    assert await _gone(mark)


@pytest.mark.parametrize("kind", ["daemon", "storm"])
async def test_kill_all_ends_daemons_and_the_sandbox_goes_on(kind: str, sandbox: Sandbox, mark: str) -> None:
    """To kill the group of the command does not reach what has left it."""
    process = await sandbox.start([PYTHON, "-c", HOSTILE[kind], mark])
    while "up" not in [entry.name for entry in await sandbox.files.list()]:
        await asyncio.sleep(0.01)
    if kind == "storm":
        await process.wait()  # its child has a group of its own by then, or will have
    await process.kill()
    process.release()
    assert not await _gone(mark, within_s=0.4)
    await sandbox.kill_all()
    assert await _gone(mark)
    assert (await sandbox.run("echo here")).text == "here\n"


async def test_everything_dies_with_bwrap_itself(mark: str) -> None:
    """The controller may have to kill it; without a process's last wish the agent would go on under another parent."""
    wish = ("if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail", "if (0) fail")
    async with Weakened(agent=(wish,)).sandbox() as weak:
        await weak.start(["/bin/sh", "-c", "sleep 60", mark])
        os.kill(weak.launcher.pid, signal.SIGKILL)
        assert not await _gone(mark, within_s=0.4)
    assert await _gone(mark)
    async with await Sandbox.create() as sandbox:
        assert isinstance(sandbox, BubblewrapSandbox)
        process = await sandbox.start(["/bin/sh", "-c", "sleep 60", mark])
        os.kill(sandbox.launcher.pid, signal.SIGKILL)
        assert await _gone(mark)
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(process.wait(), DEADLINE_S)
        process.release()


@pytest.mark.parametrize("doing", ["run", "read", "write to stdin", "terminal", "shell"])
async def test_no_call_waits_for_a_sandbox_that_is_dead(doing: str, sandbox: Sandbox) -> None:
    """While it lives, the same call does wait."""
    assert isinstance(sandbox, BubblewrapSandbox)
    process = await sandbox.start(["/bin/sleep", "60"], stdin=True)
    match doing:
        case "run":
            call = asyncio.ensure_future(sandbox.run(["/bin/sleep", "60"]))
        case "read":
            call = asyncio.ensure_future(process.stdout.read())  # type: ignore[arg-type]
        case "write to stdin":
            call = asyncio.ensure_future(process.write(bytes(8 << 20)))  # type: ignore[arg-type]
        case "terminal":
            call = asyncio.ensure_future((await sandbox.start(["/bin/sleep", "60"])).wait())  # type: ignore[arg-type]
        case _:
            call = asyncio.ensure_future((await sandbox.shell()).run("sleep 60"))
    done, _ = await asyncio.wait([call], timeout=0.3)
    assert not done
    os.kill(sandbox.launcher.pid, signal.SIGKILL)
    done, _ = await asyncio.wait([call], timeout=DEADLINE_S)
    assert done
    assert call.exception() is None or isinstance(call.exception(), SandboxLost)
    process.release()


COUNTING = """
import signal
for number in set(range(1, 65)) - {9, 19, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
leader = os.getpid()
if os.fork() == 0:
    while True:  # wake the other one, if it is ever halted alone
        os.kill(leader, signal.SIGCONT)
        time.sleep(0.001)
while True:
    with open('count', 'a') as file:
        file.write('x')
    time.sleep(0.001)
"""


async def _grows(path: Path, within_s: float) -> bool:
    before = path.stat().st_size
    return await soon(lambda: path.stat().st_size > before, within_s)


async def test_nothing_runs_on_in_a_paused_sandbox(tmp_path: Path) -> None:
    """A signal that can be ignored, or one that reaches a single process, does not halt a pair that wakes itself."""
    async with Sandbox.create(tmp_path / "workspace") as sandbox:
        count = tmp_path / "workspace" / "count"
        process = await sandbox.start([PYTHON, "-c", program(COUNTING)])
        assert await soon(count.exists, DEADLINE_S)
        for number in (signal.SIGTSTP, signal.SIGSTOP):
            await process.signal(number, group=False)
            assert await _grows(count, DEADLINE_S)
        await sandbox.pause()
        assert not await _grows(count, 0.5)
        await sandbox.resume()
        assert await _grows(count, DEADLINE_S)
        process.release()


WOKEN = """
watch = libc.inotify_init1(0)
libc.inotify_add_watch(watch, b'/workspace/door', 0xFFF)
try:
    fcntl.fcntl(watch, 10, signal.SIGCONT)  # F_SETSIG
except OSError:
    pass
fcntl.fcntl(watch, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(watch, fcntl.F_SETFL, os.O_ASYNC)
signal.signal(signal.SIGIO, signal.SIG_IGN)
while True:
    with open('count', 'a') as file:
        file.write('x')
    time.sleep(0.001)
"""


async def _wakes(sandbox: Sandbox, count: Path) -> bool:
    """Pause a sandbox, knock by changing a file, and say whether something in it goes on."""
    await sandbox.files.mkdir("door")
    process = await sandbox.start([PYTHON, "-c", program(WOKEN)])
    assert await soon(count.exists, DEADLINE_S)
    await sandbox.pause()
    await sandbox.files.write("door/knock", b"")
    woken = await _grows(count, 0.5)
    process.release()
    return woken


async def test_a_halted_process_is_not_woken_by_a_file(tmp_path: Path) -> None:
    once = ("if (paused) kill(-1, SIGSTOP);", "")
    async with Weakened(leave_open=("fcntl",), agent=(once,)).sandbox(str(tmp_path / "weak")) as weak:
        assert await _wakes(weak, tmp_path / "weak" / "count")
    async with Sandbox.create(tmp_path / "ours") as sandbox:
        assert not await _wakes(sandbox, tmp_path / "ours" / "count")


async def test_a_command_that_will_not_end_is_ended_when_its_time_is_up(sandbox: Sandbox) -> None:
    """The polite signal alone would be ignored, by it and by what it has started."""
    stubborn = "trap '' TERM INT HUP; (trap '' TERM; sleep 61) & while :; do sleep 1; done"
    process = await sandbox.start(stubborn)
    await process.signal(signal.SIGTERM)
    assert await soon(lambda: process.exit is None, 0.2)
    await process.kill()
    process.release()
    ran = await asyncio.wait_for(sandbox.run(stubborn, timeout_s=0.3), DEADLINE_S)
    assert (ran.limit, ran.exit.signal) == ("time", signal.SIGKILL)
    assert "sleep 61" not in (await sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).text.replace("trap", "")


async def test_a_memory_bomb_ends_and_the_agent_does_not() -> None:
    """With room enough the same program ends well."""
    text = "held = []\nfor _ in range(96):\n    held.append(b'x' * (4 << 20))\n    time.sleep(0.005)"
    async with Sandbox.create() as roomy:
        assert (await outcome_in(roomy, program(text))).through
    async with Sandbox.create(limits=Limits(memory_bytes=128 << 20)) as sandbox:
        ran = await sandbox.run([PYTHON, "-c", program(f"{text}\ntime.sleep(10)")], timeout_s=DEADLINE_S)
        assert (ran.exit.signal, ran.limit) == (signal.SIGKILL, "memory")
        assert (await sandbox.run("echo here")).text == "here\n"


async def test_a_sandbox_does_not_start_without_its_filter() -> None:
    recipe = Recipe()
    with pytest.raises(SandboxUnusable, match="filter"):
        await BubblewrapSandbox.start_from(recipe, plan=draw_plan(recipe, filter_program=b""))
    async with await BubblewrapSandbox.start_from(recipe, plan=draw_plan(recipe)) as sandbox:
        assert (await sandbox.run("grep Seccomp: /proc/self/status")).text.split() == ["Seccomp:", "2"]


def _left_behind(*, locked: bool, inode: int | None = None) -> tuple[Record, Path]:
    """Make the record of a sandbox with a folder to throw away, held by a controller or not."""
    folder = Path(tempfile.mkdtemp(prefix="skep-attack-"))
    (folder / "file").touch()
    record = Record.open(f"attack{secrets.token_hex(6)}")
    record.note(Group("none", {}), (str(folder), inode or folder.stat().st_ino))
    if not locked:
        fcntl.flock(record.fd, fcntl.LOCK_UN)
    return record, folder


def test_what_a_living_controller_holds_is_not_swept() -> None:
    """The same record without its lock is that of a dead one."""
    held, kept = _left_behind(locked=True)
    dead, gone = _left_behind(locked=False)
    swept = sweep()
    assert (held.path.stem in swept, kept.exists()) == (False, True)
    assert (dead.path.stem in swept, gone.exists()) == (True, False)
    fcntl.flock(held.fd, fcntl.LOCK_UN)
    sweep()
    assert not kept.exists()
    held.close()
    dead.close()


def test_a_folder_that_only_has_the_name_of_one_left_behind_is_not_swept() -> None:
    """Somebody may have made another folder at the same path since."""
    other, kept = _left_behind(locked=False, inode=1)
    same, gone = _left_behind(locked=False)
    sweep()
    assert kept.exists() and not gone.exists()
    (kept / "file").unlink()
    kept.rmdir()
    other.path.unlink(missing_ok=True)
    other.close()
    same.close()


def test_the_records_lie_where_nobody_else_can_plant_them() -> None:
    found = records_folder().stat()
    assert (found.st_uid, found.st_mode & 0o077) == (os.geteuid(), 0)
