"""A twin at work in a sandbox that stands in for another machine."""

from __future__ import annotations

import ast
import asyncio
import io
import os
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.sandbox.machines import TWIN, Machine, start_on_machine

from skep.errors import NotFound, SandboxLost
from skep.sandbox.interpreter import Interpreter
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.probe import landlock_abi
from skep.sandbox.sandbox import Sandbox, Size
from skep.sandbox.stream import PYTHON, StreamSandbox, twin_program
from skep.sandbox.twin.inside.paths import Root, _Walk
from skep.testing.promise import eventually, running

needs_fence = pytest.mark.skipif(landlock_abi() < 6, reason="the kernel cannot keep signals apart (Linux 6.12 can)")


@pytest.fixture
async def sandbox() -> AsyncIterator[StreamSandbox]:
    async with await start_on_machine() as made:
        yield made


def machine(sandbox: StreamSandbox) -> Sandbox:
    assert isinstance(sandbox.housing, Machine)
    return sandbox.housing.sandbox


def test_the_program_is_the_same_each_time_and_python_3_9_can_read_it() -> None:
    assert twin_program() == twin_program.__wrapped__()
    with zipfile.ZipFile(io.BytesIO(twin_program())) as archive:
        sources = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
    assert "skep/sandbox/twin/inside/main.py" in sources
    for name, source in sources.items():
        ast.parse(source, name, feature_version=(3, 9))


def test_the_program_takes_nothing_but_the_standard_library_along() -> None:
    with zipfile.ZipFile(io.BytesIO(twin_program())) as archive:
        trees = {name: ast.parse(archive.read(name)) for name in archive.namelist() if name.endswith(".py")}
    own = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("skep"):
                assert node.module in own, f"{name} needs {node.module}"


@needs_fence
async def test_a_command_can_end_all_others_and_not_the_twin(sandbox: StreamSandbox) -> None:
    job = await sandbox.background("exec sleep 1000")
    await sandbox.run("kill -9 -1")
    assert (await job.wait()).signal == 9
    assert (await sandbox.run("echo fine")).stdout == b"fine\n"


async def test_without_the_fence_the_same_command_ends_the_twin() -> None:
    async with await start_on_machine(None, "--bare") as sandbox:
        with pytest.raises(SandboxLost):
            await sandbox.run("kill -9 -1")


DAEMON = (
    "setsid sh -c 'echo $$ > daemon; exec sleep 1000' < /dev/null > /dev/null 2>&1 & "
    "until [ -s daemon ]; do sleep 0.01; done"
)


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_guard_ends_what_a_killed_twin_leaves_behind(guarded: bool) -> None:
    async with await start_on_machine(None, *(["--guarded"] if guarded else [])) as sandbox:
        outside = machine(sandbox)
        await sandbox.run(DAEMON)
        daemon = int(await sandbox.files.read("daemon"))
        twins = await _twins(outside)
        assert len(twins) == 1 + guarded
        call = asyncio.ensure_future(sandbox.run("sleep 1000"))
        await outside.run(f"kill -9 {twins[-1]}")
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(call, 5)
        if guarded:
            await eventually(lambda: _ended(outside, daemon))
        else:
            assert await running(outside, daemon)


async def test_a_twin_whose_guard_is_killed_ends_everything() -> None:
    async with await start_on_machine(None, "--guarded") as sandbox:
        outside = machine(sandbox)
        await sandbox.run(DAEMON)
        daemon = int(await sandbox.files.read("daemon"))
        guard, _ = await _twins(outside)
        await outside.run(f"kill -9 {guard}")
        await eventually(lambda: _ended(outside, daemon))


@pytest.mark.parametrize("checked", ["default", "always"], ids=["as it is compiled", "as another Python compiles it"])
async def test_a_twin_that_is_hung_up_on_ends_everything_and_itself(checked: str) -> None:
    async with Sandbox.create() as outside:
        await outside.files.write(TWIN, twin_program())
        # Where all bytecode is checked ours is refused, as that of another version is: the sources serve.
        python = [*PYTHON, "--check-hash-based-pycs", checked]
        process = await outside.start([*python, TWIN, "--patience", "100"], stdin=True)
        assert await process.stdout.read()
        await process.close_stdin()
        assert (await asyncio.wait_for(process.wait(), 10)).code == 0
        process.release()


async def test_a_twin_that_hears_nothing_loses_its_patience() -> None:
    async with Sandbox.create() as outside:
        await outside.files.write(TWIN, twin_program())
        process = await outside.start([*PYTHON, TWIN, "--patience", "0.3"], stdin=True)
        assert (await asyncio.wait_for(process.wait(), 10)).code == 0
        process.release()


async def test_a_controller_that_only_listens_keeps_its_twin() -> None:
    async with await start_on_machine(None, "--patience", "1.5") as sandbox:
        assert (await sandbox.run("sleep 3; echo still here")).stdout == b"still here\n"


HUNGRY = "import time; x = [b'x' * (1 << 20) for _ in range(400)]; time.sleep(60)"


async def test_memory_past_the_limit_ends_the_largest_and_says_so() -> None:
    async with await start_on_machine(Limits(memory_bytes=100 * MIB)) as sandbox:
        assert (await sandbox.run(["python3", "-c", HUNGRY])).limit == "memory"
        assert (await sandbox.run("true")).limit is None


async def test_more_processes_than_the_limit_are_refused_and_said() -> None:
    async with await start_on_machine(Limits(processes=30)) as sandbox:
        result = await sandbox.run("for i in $(seq 100); do sleep 5 & done; exit 1", timeout_s=20)
        assert result.limit == "processes"
        await sandbox.kill_all()
        assert (await sandbox.run("exit 1")).limit is None


async def test_a_workspace_past_its_limit_ends_what_runs_and_says_so() -> None:
    async with await start_on_machine(Limits(disk_bytes=20 * MIB)) as sandbox:
        fill = "for i in $(seq 100); do head -c 4000000 /dev/urandom > f$i; sleep 0.05; done"
        result = await sandbox.run(fill, timeout_s=60)
        assert (result.limit, result.exit.signal) == ("disk", 9)


async def test_a_file_that_nobody_reads_on_keeps_no_command_waiting(sandbox: StreamSandbox) -> None:
    await sandbox.run(["truncate", "-s", "300M", "big"])
    pieces = [sandbox.files.stream("big") for _ in range(4)]
    for stream in pieces:
        assert await anext(stream)
    assert (await sandbox.run("echo through")).stdout == b"through\n"
    for stream in pieces:
        await stream.aclose()  # type: ignore[attr-defined]


SERVER = (
    "import socket\n"
    "listener = socket.create_server(('127.0.0.1', 8123))\n"
    "print('ready', flush=True)\n"
    "while True:\n"
    "    visitor, _ = listener.accept()\n"
    "    while data := visitor.recv(65536):\n"
    "        visitor.sendall(data.upper())\n"
    "    visitor.sendall(b'BYE')\n"
    "    visitor.close()\n"
)


async def test_a_server_inside_is_reached_through_the_stream(sandbox: StreamSandbox) -> None:
    server = await sandbox.start(["python3", "-c", SERVER])
    await server.stdout.read()
    loop = asyncio.get_running_loop()
    for _ in range(2):
        with await sandbox.connect(8123) as visit:
            sending = asyncio.ensure_future(loop.sock_sendall(visit, b"x" * 3 * MIB))
            seen = 0
            while seen < 3 * MIB:
                seen += len(await loop.sock_recv(visit, 1 << 16))
            await sending
            visit.shutdown(1)
            assert await loop.sock_recv(visit, 100) == b"BYE"
            assert await loop.sock_recv(visit, 100) == b""
    with pytest.raises(NotFound):
        await sandbox.connect(8124)
    server.release()


async def test_visits_that_are_over_leave_nothing_open(sandbox: StreamSandbox) -> None:
    server = await sandbox.start(["python3", "-c", SERVER])
    await server.stdout.read()
    before = _open_descriptors()
    for _ in range(5):
        (await sandbox.connect(8123)).close()

    async def settled() -> bool:
        return _open_descriptors() <= before and len(sandbox._conversation._parties) <= 1

    await eventually(settled)
    server.release()


async def test_cells_run_in_a_kernel_over_the_stream(sandbox: StreamSandbox) -> None:
    async with Interpreter(sandbox) as interpreter:
        await interpreter.run("x = 20")
        cell = await interpreter.run("print('printed'); x + 1")
        assert cell.stdout == "printed\n" and "21" in str(cell.results)


async def test_many_processes_at_once_are_all_told_apart(sandbox: StreamSandbox) -> None:
    results = await asyncio.gather(*(sandbox.run(f"head -c 300000 /dev/zero; echo {n}") for n in range(30)))
    assert [result.stdout[300_000:] for result in results] == [b"%d\n" % n for n in range(30)]


async def test_what_is_over_leaves_nothing_open_in_the_twin(sandbox: StreamSandbox) -> None:
    outside = machine(sandbox)
    (twin,) = await _twins(outside)

    async def use() -> None:
        await sandbox.run("echo out; echo err >&2", input=b"in")
        await sandbox.files.write("file", b"1")
        await sandbox.files.read("file")
        await anext(sandbox.files.stream("file"))
        for size in (None, Size()):
            process = await sandbox.start("sleep 1000", stdin=True, terminal=size)
            process.release()
            await process.kill()
            await process.wait()
        changes = sandbox.files.watch()
        waiting = asyncio.ensure_future(anext(changes))
        await sandbox.run("until [ -e probe ]; do touch probe; done")
        waiting.cancel()

    async def count() -> int:
        return len((await outside.run(["ls", f"/proc/{twin}/fd"])).text.split())

    async def settled() -> bool:
        return await count() <= before

    await use()
    before = await count()
    for _ in range(4):
        await use()
    await eventually(settled)


class TestWalk:
    """The way to open a path on a kernel without openat2, which ends where the kernel's own does."""

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        (tmp_path / "a/b").mkdir(parents=True)
        (tmp_path / "a/b/file").write_text("deep")
        (tmp_path / "file").write_text("top")
        for name, target in {
            "absolute": "/a/b/file", "relative": "a/b/file", "up": "../../../../file", "folder": "a/b",
            "loop": "loop", "chain": "relative", "dangling": "nowhere", "a/back": "../file", "a/b/root": "/",
        }.items():  # fmt: skip
            (tmp_path / name).symlink_to(target)
        return tmp_path

    @pytest.mark.parametrize(
        "path",
        ["file", "a/b/file", "absolute", "relative", "up", "chain", "folder/file", "a/back", "a/b/root/file",
         "a/b/../../file", "../../file", "loop", "dangling", "nowhere", "file/below", "a", ".", "a/b/root/a/b/root/a"],
    )  # fmt: skip
    def test_it_ends_where_the_kernel_does(self, tree: Path, path: str) -> None:
        fd = os.open(tree, os.O_PATH | os.O_DIRECTORY)
        try:
            root = Root(b"/")
            by_kernel = _outcome(lambda: root.open_at(fd, path.encode(), os.O_PATH, 0x10))
            by_hand = _outcome(lambda: _Walk(fd, follow=True).open(path.encode(), os.O_PATH))
            assert by_hand == by_kernel
        finally:
            os.close(fd)

    def test_no_link_of_proc_leads_out(self) -> None:
        fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
        try:
            for path in (b"proc/self/root/etc/passwd", b"proc/self/fd/%d/etc" % fd, b"proc/self/cwd"):
                with pytest.raises(OSError, match="symbolic links"):
                    _Walk(fd, follow=True).open(path, os.O_PATH)
        finally:
            os.close(fd)


def _outcome(work: object) -> tuple[int, int] | int:
    assert callable(work)
    try:
        fd = work()
    except OSError as error:
        return error.errno or 0
    try:
        found = os.fstat(fd)
        return found.st_dev, found.st_ino
    finally:
        os.close(fd)


async def _twins(outside: Sandbox) -> list[int]:
    """Return the processes of the twin, the oldest first."""
    found = await outside.run("grep -l '/tmp/twin[.]py' /proc/[0-9]*/cmdline")
    return sorted(int(path.split("/")[2]) for path in found.text.split())


def _open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def _ended(sandbox: Sandbox, pid: int) -> bool:
    return not await running(sandbox, pid)
