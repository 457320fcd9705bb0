"""What an agent's files can do to the host that reads and writes them, and to the limit on the disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.attacks.attack import DEADLINE_S, PYTHON, SECRET, Plain, outcome_in, program, soon

from skep.errors import Denied, InvalidRequest, LimitReached, SandboxUnusable, SkepError
from skep.sandbox.binary import Bwrap
from skep.sandbox.bubblewrap import BubblewrapSandbox, draw_plan
from skep.sandbox.limits import Limits
from skep.sandbox.recipe import Recipe
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.tree import Tree


def _plant(folder: Path, secret: Path, how: str) -> str:
    """Lay a trap that leads to the secret; return the path that springs it."""
    match how:
        case "an absolute link":
            (folder / "trap").symlink_to(secret)
            return "trap"
        case "a link through ..":
            (folder / "trap").symlink_to(os.path.relpath(secret, folder))
            return "trap"
        case "a link to a folder":
            (folder / "trap").symlink_to(secret.parent)
            return "trap/secret"
        case "a chain of links":
            (folder / "first").symlink_to(secret.parent)
            (folder / "second").symlink_to("first")
            (folder / "trap").symlink_to("second/secret")
            return "trap"
        case "a link through /proc":
            (folder / "trap").symlink_to(f"/proc/{os.getpid()}/root{secret}")
            return "trap"
        case _:
            raise AssertionError(how)


TRAPS = ["an absolute link", "a link through ..", "a link to a folder", "a chain of links", "a link through /proc"]


@pytest.mark.parametrize("how", TRAPS)
async def test_no_link_is_read_out_of_the_workspace(how: str, files: Tree, folder: Path, secret: Path) -> None:
    path = _plant(folder, secret, how)
    assert (folder / path).read_text() == SECRET
    with pytest.raises(SkepError):
        await files.read(path)
    with pytest.raises(SkepError):
        [piece async for piece in files.stream(path)]


@pytest.mark.parametrize("how", TRAPS)
async def test_no_link_is_written_through(how: str, files: Tree, folder: Path, secret: Path) -> None:
    path = _plant(folder, secret, how)
    (folder / path).write_text("planted")
    assert secret.read_text() == "planted"
    secret.write_text(SECRET)
    for act in (files.append(path, b"planted"), files.write(path, b"planted")):
        with contextlib.suppress(SkepError):
            await act
    assert secret.read_text() == SECRET


async def test_a_write_replaces_a_link_and_never_writes_through_it(files: Tree, folder: Path, secret: Path) -> None:
    trap = folder / _plant(folder, secret, "an absolute link")
    await files.write("trap", b"mine")
    assert secret.read_text() == SECRET
    assert not trap.is_symlink()
    trap.unlink()
    trap.symlink_to(secret)
    trap.write_bytes(b"planted")
    assert secret.read_bytes() == b"planted"


@pytest.mark.parametrize("act", ["mkdir", "move", "remove", "list", "watch"])
async def test_no_folder_is_reached_through_a_link(act: str, files: Tree, folder: Path, secret: Path) -> None:
    (folder / "trap").symlink_to(secret.parent)
    (folder / "file").write_text("mine")
    with contextlib.suppress(SkepError):
        match act:
            case "mkdir":
                await files.mkdir("trap/planted")
            case "move":
                await files.move("file", "trap/planted")
            case "remove":
                await files.remove("trap/secret")
            case "list":
                assert "secret" not in [entry.name for entry in await files.list("trap")]
            case _:
                with pytest.raises(SkepError):
                    await asyncio.wait_for(anext(aiter(files.watch("trap"))), DEADLINE_S)
    assert [path.name for path in secret.parent.iterdir()] == ["secret"]
    (folder / "trap" / "planted").mkdir()
    assert (secret.parent / "planted").exists()


@pytest.mark.parametrize("dots", ["..", "../..", "/workspace/..", "a/../..", "../workspace/.."])
async def test_dots_do_not_lead_out(dots: str, files: Tree, folder: Path) -> None:
    """Inside, dots lead to folders inside; at rest there is only the workspace."""
    (folder.parent / "outside").write_text(SECRET)
    (folder.parent / "outside").chmod(0o666)
    assert (folder / ".." / "outside").read_text() == SECRET
    with pytest.raises(SkepError):
        await files.read(f"{dots}/outside")
    with contextlib.suppress(SkepError):
        await files.write(f"{dots}/outside", b"planted")
    assert (folder.parent / "outside").read_text() == SECRET


async def test_a_fifo_blocks_nobody(files: Tree, folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "fifo").chmod(0o666)
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["/bin/cat", folder / "fifo"], timeout=0.3)
    for act in (files.read("fifo"), files.append("fifo", b"x")):
        with pytest.raises(Denied):
            await asyncio.wait_for(act, DEADLINE_S)
    assert (await files.stat("fifo")).kind == "other"


async def test_a_socket_is_not_opened(files: Tree, folder: Path) -> None:
    """A program that takes any path for its server would speak to whoever listens."""
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(os.path.relpath(folder / "socket"))
        server.listen()
        client.connect(os.path.relpath(folder / "socket"))
        with pytest.raises(Denied):
            await files.read("socket")


@pytest.mark.parametrize(
    "device", ["/dev/zero", "/dev/tty", "/dev/full", "/proc/kmsg", "/proc/self/environ", "/proc/1/mem"]
)
async def test_no_device_and_nothing_of_proc_is_read(device: str, sandbox: Sandbox) -> None:
    """Through a link, where plain reading would take what is there, without end perhaps."""
    await sandbox.run(["/bin/ln", "-s", device, "trap"])
    with open("/dev/zero", "rb") as endless:
        assert len(endless.read(1 << 20)) == 1 << 20
    with pytest.raises(SkepError):
        await asyncio.wait_for(sandbox.files.read("trap"), DEADLINE_S)


async def test_a_magic_link_of_a_process_inside_is_not_followed(sandbox: Sandbox) -> None:
    """By /proc/PID/root or /proc/PID/fd a name leads to wherever a process has something open."""
    await sandbox.run("echo inside > file")
    holder = await sandbox.start("exec 9< file; exec sleep 60")
    for link in ("fd/9", "cwd/file", "root/workspace/file"):
        await sandbox.run(["/bin/ln", "-sfn", f"/proc/{holder.pid}/{link}", "trap"])
        assert (await sandbox.run(["/bin/cat", "trap"])).text in ("inside\n", "")
        with pytest.raises(SkepError):
            await sandbox.files.read("trap")
    holder.release()


async def test_appending_does_not_reach_another_name_of_the_file(files: Tree, folder: Path, outside: Path) -> None:
    """Package caches hand out hard links; what is added to one name is in all of them."""
    other = folder.parent / "cached"
    other.write_text("shared")
    other.chmod(0o666)
    os.link(other, folder / "linked")
    with (folder / "linked").open("a") as plain:
        plain.write("!")
    assert other.read_text() == "shared!"
    with pytest.raises(Denied):
        await files.append("linked", b"planted")
    await files.write("linked", b"mine")
    assert other.read_text() == "shared!"


async def test_a_huge_sparse_file_does_not_fill_the_controller(files: Tree, folder: Path) -> None:
    with (folder / "huge").open("wb") as file:
        file.truncate(64 << 20)
    (folder / "huge").chmod(0o644)
    assert len((folder / "huge").read_bytes()) == 64 << 20
    with pytest.raises(LimitReached):
        await files.read("huge", limit_bytes=1 << 20)


async def test_a_lease_on_a_file_does_not_hold_its_reader(folder: Path) -> None:
    """The kernel lets whoever holds a lease delay an open by 45 seconds."""
    lease = """
    file = open('leased', 'w+')
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(file, 1024, fcntl.F_WRLCK)
    open('up', 'w').close()
    time.sleep(60)
    """
    async with Sandbox.create(folder) as hostile:
        holder = await hostile.start([PYTHON, "-c", program(lease)])
        assert await soon((folder / "up").exists, DEADLINE_S)
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(["/bin/cat", folder / "leased"], timeout=0.5)
        with contextlib.suppress(SkepError):
            await asyncio.wait_for(hostile.files.read("leased"), 5)
        holder.release()


_SWAPPER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
os.chdir(sys.argv[1])
print("up", flush=True)
while True:
    libc.renameat2(-100, sys.argv[2].encode(), -100, sys.argv[3].encode(), 2)
"""


@contextmanager
def _swapping(folder: Path, first: str, second: str) -> Iterator[None]:
    """Exchange two names of a folder for each other without end."""
    swapper = subprocess.Popen([sys.executable, "-c", _SWAPPER, folder, first, second], stdout=subprocess.PIPE)
    assert swapper.stdout is not None
    swapper.stdout.readline()
    try:
        yield
    finally:
        swapper.kill()
        swapper.wait()
        swapper.stdout.close()


def _checked_read(folder: Path) -> str:
    """Read as code does that looks first and opens then."""
    path = folder / "place"
    return (path / "secret").read_text() if not path.is_symlink() else ""


async def test_a_folder_swapped_for_a_link_is_never_read_through(folder: Path, secret: Path) -> None:
    tree = Tree.at(str(folder))
    (folder / "place").mkdir()
    (folder / "place" / "secret").write_text("inside")
    (folder / "link").symlink_to(secret.parent)
    with _swapping(folder, "place", "link"):
        deadline = time.monotonic() + DEADLINE_S
        while _checked_read(folder) != SECRET:
            assert time.monotonic() < deadline, "the control never lost its race"
        for _ in range(400):
            with contextlib.suppress(SkepError):
                assert await tree.read("place/secret") == b"inside"
    tree.close()


@pytest.mark.parametrize("act", ["write", "move", "remove"])
async def test_a_folder_swapped_for_a_link_is_never_changed_through(act: str, folder: Path, secret: Path) -> None:
    """Code that looks first and acts then is led out in between."""
    tree = Tree.at(str(folder))
    (folder / "link").symlink_to(secret.parent)
    _act_after_a_check(folder, secret)
    for _ in range(30):
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            (folder / "top/place").mkdir(parents=True)
            (folder / "top/place/secret").write_text("inside")
        (folder / "file").write_text("mine")
        with _swapping(folder, "top/place", "link"), contextlib.suppress(SkepError):
            match act:
                case "write":
                    await tree.write("top/place/secret", b"planted")
                case "move":
                    await tree.move("file", "top/place/secret")
                case _:
                    await tree.remove("top", recursive=True)
        assert secret.read_text() == SECRET
        assert [path.name for path in secret.parent.iterdir()] == ["secret"]
    tree.close()


def _act_after_a_check(folder: Path, secret: Path) -> None:
    """Look, be swapped, act: what code that trusts its look does to the host."""
    place = folder / "top/place"
    place.mkdir(parents=True)
    assert not place.is_symlink()
    place.rename(folder / "aside")
    place.symlink_to(secret.parent)
    (place / "secret").unlink()
    assert not secret.exists()
    secret.write_text(SECRET)
    secret.chmod(0o666)
    place.unlink()
    for path in (folder, folder / "top"):
        path.chmod(0o777)


@pytest.mark.parametrize("recursive", [False, True])
async def test_removing_a_link_leaves_what_it_leads_to(
    recursive: bool, files: Tree, folder: Path, secret: Path
) -> None:
    (folder / "top").mkdir()
    (folder / "top").chmod(0o777)
    (folder / "top" / "trap").symlink_to(secret.parent)
    await files.remove("top/trap" if not recursive else "top", recursive=recursive)
    assert secret.read_text() == SECRET
    shutil.rmtree(folder / "top", ignore_errors=True)
    (folder / "trap").symlink_to(secret.parent)
    for path in (folder / "trap").iterdir():
        path.unlink()
    assert not secret.exists()


async def test_a_tree_deeper_than_any_path_is_measured_and_removed(sandbox: Sandbox) -> None:
    """Code that goes down by recursion runs out of stack or descriptors on the way."""
    deep = "os.mkdir('top')\nos.chdir('top')\nfor _ in range(1100):\n    os.mkdir('d')\n    os.chdir('d')"
    assert (await outcome_in(sandbox, program(deep))).through
    naive = subprocess.run(
        [sys.executable, "-c", "import os\nfor i in range(1100):\n os.mkdir('d'); os.chdir('d')\n"
         "os.chdir('/'); import sys, shutil; shutil.rmtree(sys.argv[1])", scratch := _scratch()],
        cwd=scratch, capture_output=True,
    )  # fmt: skip
    subprocess.run(["/bin/rm", "-rf", scratch], check=True)
    if sys.version_info < (3, 13):
        assert b"RecursionError" in naive.stderr or b"Too many open files" in naive.stderr
    assert isinstance(sandbox.files, Tree)
    assert (await sandbox.files.measure()).inodes >= 1100
    await sandbox.files.remove("top", recursive=True)
    assert await sandbox.files.list() == []


def _scratch() -> str:
    return tempfile.mkdtemp(prefix="skep-deep-")


async def test_folders_shut_to_their_owner_do_not_outlive_the_sandbox(tmp_path: Path) -> None:
    """A plain removal stops at the first folder that it may not enter."""
    shut = tmp_path / "shut"
    (shut / "in").mkdir(parents=True)
    (shut / "in" / "file").touch()
    shut.chmod(0)
    if os.geteuid() != 0:
        shutil.rmtree(shut, ignore_errors=True)
        assert shut.exists()
    shut.chmod(0o700)
    sandbox = await BubblewrapSandbox.start_from(Recipe())
    await sandbox.run("mkdir -p a/b/c && touch a/b/c/d && chmod 0 a/b/c a/b a && chmod 0 /workspace")
    assert sandbox.launcher.record.throwaway is not None
    made = Path(sandbox.launcher.record.throwaway[0])
    assert made.exists()
    await sandbox.stop()
    assert not made.exists()


async def test_a_flood_of_changes_ends_in_an_overflow_and_not_in_memory(sandbox: Sandbox) -> None:
    """Every change is seen while there are few of them."""
    assert "overflow" not in await asyncio.wait_for(_kinds(sandbox, "touch a b c last"), DEADLINE_S)
    await sandbox.files.remove("last")
    flood = "for i in range(12000):\n    open('f', 'w').close()\n    os.unlink('f')\nopen('last', 'w')"
    assert "overflow" in await asyncio.wait_for(_kinds(sandbox, [PYTHON, "-c", program(flood)]), DEADLINE_S)


async def _kinds(sandbox: Sandbox, command: str | list[str]) -> set[str]:
    """Watch the workspace, take nothing while a command runs, and return what kinds of changes there were."""
    watching = sandbox.files.watch()
    first = asyncio.ensure_future(anext(aiter(watching)))
    while not first.done():
        await sandbox.files.write("first", b"")
        await asyncio.sleep(0.01)
    seen: set[str] = {first.result().kind}
    await sandbox.run(command)
    async for change in watching:
        seen.add(change.kind)
        if change.path == "last" or change.kind == "overflow":
            break
    await watching.aclose()  # type: ignore[attr-defined]
    return seen


HOLD = "\nopen('/workspace/full', 'w').close() if hold == 0 else time.sleep(hold)"
FILL = {
    "many files": "for i in range(40):\n    open(f'f{i}', 'wb').write(bytes(4 << 20))",
    "files without a name": """
held = []
for i in range(40):
    held.append(open('f', 'wb'))
    os.unlink('f')
    held[-1].write(bytes(4 << 20)); held[-1].flush()""",
    "files in a folder that nobody may enter": """
os.mkdir('d')
held = [open(f'd/{i}', 'wb', 0) for i in range(40)]
os.chmod('d', 0)
for file in held:
    file.write(bytes(4 << 20))
os.chmod('d', 0o700) if hold == 0 else None""",
    "a workspace that is shut": """
held = [open(f'{i}', 'wb', 0) for i in range(40)]
os.chmod('/workspace', 0)
for file in held:
    file.write(bytes(4 << 20))
os.chmod('/workspace', 0o700) if hold == 0 else None""",
    "files below a very deep folder": """
for i in range(1100):
    os.mkdir('d')
    os.chdir('d')
for i in range(40):
    open(f'f{i}', 'wb').write(bytes(4 << 20))""",
    "reserved and never written": """
for i in range(40):
    os.posix_fallocate(os.open(f'f{i}', os.O_CREAT | os.O_RDWR), 0, 4 << 20)""",
    "many empty files": "for i in range(4000):\n    open(f'f{i}', 'w').close()",
}


@pytest.mark.parametrize("how", FILL)
async def test_the_disk_limit_is_not_evaded(how: str) -> None:
    """With room enough the same files can be made."""
    async with Sandbox.create() as roomy:
        assert (await outcome_in(roomy, program(FILL[how] + HOLD, hold=0))).through
    tight = Limits(disk_bytes=32 << 20, inodes=2000)
    async with Sandbox.create(limits=tight) as sandbox:
        ran = await sandbox.run([PYTHON, "-c", program(FILL[how] + HOLD, hold=15)], timeout_s=DEADLINE_S)
    assert (ran.exit.signal, ran.limit) == (signal.SIGKILL, "disk"), ran


@pytest.fixture
def room() -> Iterator[Callable[[int], None]]:
    """Take or give room on the file system of the workspaces, as others on the host do."""
    with tempfile.TemporaryFile() as file:

        def take(size: int) -> None:
            file.truncate(0)
            if size:
                os.posix_fallocate(file.fileno(), 0, size)

        yield take


async def test_room_that_others_free_does_not_hide_what_is_taken(room: Callable[[int], None]) -> None:
    """What is left on the file system grows meanwhile, so it tells nothing."""
    room(600 << 20)
    fill = f"open('up', 'w').close()\nwhile os.path.exists('up'): time.sleep(0.01)\n{FILL['many files']}{HOLD}"
    async with Sandbox.create(limits=Limits(disk_bytes=32 << 20)) as sandbox:
        run = asyncio.create_task(sandbox.run([PYTHON, "-c", program(fill, hold=15)], timeout_s=DEADLINE_S))
        while "up" not in [entry.name for entry in await sandbox.files.list()]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # the watcher has had its first look, with less room than there will be
        before = os.statvfs(tempfile.gettempdir()).f_bavail
        room(0)
        await sandbox.files.remove("up")
        ran = await run
        assert os.statvfs(tempfile.gettempdir()).f_bavail > before, "the control: others did free more than was taken"
    assert (ran.exit.signal, ran.limit) == (signal.SIGKILL, "disk")


async def test_the_limit_is_not_crept_past(room: Callable[[int], None]) -> None:
    """Steps that are small enough each, and somebody who has the folder measured after every one of them."""
    creep = "for i in range(12):\n    open(f'g{i}', 'wb').write(bytes(4 << 20))\n    time.sleep(step)"
    async with Sandbox.create() as roomy:
        assert (await outcome_in(roomy, program(creep, step=0))).through
    async with Sandbox.create(limits=Limits(disk_bytes=16 << 20)) as sandbox:
        run = asyncio.create_task(sandbox.run([PYTHON, "-c", program(creep, step=1)], timeout_s=DEADLINE_S))
        while not run.done():
            for size in (64 << 20, 0):
                room(size)
                await asyncio.sleep(0.2)
        assert (run.result().exit.signal, run.result().limit) == (signal.SIGKILL, "disk")


async def test_sparse_files_do_not_count_for_what_they_do_not_hold() -> None:
    """What is counted is what lies on the disk: an apparent size of 2 GB is none."""
    sparse = "for i in range(100):\n    open(f'f{i}', 'wb').truncate(20 << 20)\ntime.sleep(0.5)"
    full = "for i in range(100):\n    open(f'f{i}', 'wb').write(bytes(20 << 20))\ntime.sleep(5)"
    async with Sandbox.create(limits=Limits(disk_bytes=64 << 20)) as sandbox:
        assert (await outcome_in(sandbox, program(sparse))).through
        assert (await sandbox.run([PYTHON, "-c", program(full)])).limit == "disk"


@contextmanager
def _planted(folder: Path, target: Path) -> Iterator[None]:
    """Plant the link of CVE-2026-87766: seen from where bwrap builds the root, the host is at /oldroot."""
    (folder / "hive").symlink_to(f"/oldroot{target}")
    yield
    (folder / "hive").unlink()


async def test_a_link_planted_at_a_mount_point_does_not_lead_bwrap_out(folder: Path, outside: Path) -> None:
    """CVE-2026-87766: bwrap before 0.12 makes a mount point through a link that the agent left there."""
    outside.chmod(0o777)
    folder.mkdir()
    if Bwrap.find().version >= (0, 12):
        pytest.skip("this bwrap has no such hole")
    with _planted(folder, outside):
        plain = Plain(("--ro-bind", "/etc/alternatives", "/workspace/hive/planted"))
        subprocess.run([*plain.command(folder), "/bin/true"], check=False, capture_output=True)
        assert (outside / "planted").is_dir(), "the control did not write on the host"
        (outside / "planted").rmdir()
        for place in ("/workspace/hive/planted", "/opt/tools"):
            recipe = {"read_only": {"/usr/share": place}}
            with contextlib.suppress(InvalidRequest):
                async with Sandbox.create(folder, adopt=True, **recipe) as sandbox:  # type: ignore[arg-type]
                    assert (await sandbox.run("ls -d /opt/tools")).ok
        assert list(outside.iterdir()) == []


def test_nothing_is_mounted_below_a_folder_that_the_agent_writes() -> None:
    """Read as bwrap reads it: no mount point of the plan lies below a writable one that came before it."""
    plan = draw_plan(Recipe(read_only={"/usr/share": "/opt/share"}))
    try:
        words = plan.arguments
        writable = [words[i + 2] for i, word in enumerate(words) if word in ("--bind", "--bind-fd")]
        writable += [words[i + 1] for i, word in enumerate(words) if word == "--tmpfs"]
        points = [word for word in words if word.startswith("/") and not word.startswith(str(Path.home()))]
        assert set(writable) == {"/workspace", "/tmp", "/cache", "/dev/shm"}
        assert not [point for point in points for above in writable if point.startswith(above + "/")]
    finally:
        plan.close()
        if plan.throwaway is not None:
            Path(plan.throwaway[0]).rmdir()


@pytest.mark.parametrize(
    "place",
    ["/workspace", "/workspace/hive", "//workspace/hive", "///workspace", "/opt/../workspace/hive", "/./workspace/x",
     "/workspace/../workspace/x", "/tmp", "/tmp/x", "/cache/x", "/dev/shm/x", "/dev/x", "/proc/self/cwd/x",
     "/proc/1/root", "/", "//", "/opt/..", "relative", "", "/run/skep", "/run/skep/agent", "//run/skep/agent"],
)  # fmt: skip
async def test_a_place_that_the_agent_could_reach_is_refused(place: str) -> None:
    with pytest.raises(InvalidRequest):
        async with Sandbox.create(read_only={"/usr/share": place}):
            pass


async def test_a_place_that_the_agent_cannot_write_is_taken() -> None:
    """The control of the refusals above."""
    async with Sandbox.create(read_only={"/usr/share": "/opt/../opt/share"}) as sandbox:
        assert (await sandbox.run("ls /opt/share")).ok
        assert not (await sandbox.run("touch /opt/share/planted")).ok


async def test_a_link_of_the_host_does_not_lead_a_mount_below_the_workspace(folder: Path, outside: Path) -> None:
    """Shown as a link, it would carry the next mount point to where it leads inside."""
    (outside / "link").symlink_to("/workspace")
    folder.mkdir()
    with contextlib.suppress(SandboxUnusable, InvalidRequest):
        shown = {str(outside / "link"): "/opt/link", "/usr/share": "/opt/link/planted"}
        async with Sandbox.create(folder, adopt=True, read_only=shown):
            pass
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("bit", [0o4000, 0o2000], ids=["setuid", "setgid"])
def test_a_bwrap_with_privileges_is_refused(bit: int, tmp_path: Path) -> None:
    """CVE-2026-41163. The same program without the bit is taken."""
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho bubblewrap 0.11.0\n")
    bwrap.chmod(0o755)
    assert Bwrap.inspect(bwrap).version == (0, 11, 0)
    bwrap.chmod(0o755 | bit)
    with pytest.raises(SandboxUnusable, match="setuid"):
        Bwrap.inspect(bwrap)
    link = tmp_path / "link"
    link.symlink_to(bwrap)
    with pytest.raises(SandboxUnusable, match="setuid"):
        Bwrap.inspect(link)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\ud800", "y/" * 3000])
async def test_a_path_that_cannot_be_is_refused(path: str, files: Tree) -> None:
    for act in (files.read(path), files.write(path, b""), files.stat(path), files.mkdir(path), files.move(path, "z")):
        with pytest.raises(InvalidRequest):
            await act
    await files.write("x" * 200, b"")
    await files.write("deep/" * 700 + "file", b"")
