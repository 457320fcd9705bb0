"""gVisor, stand-alone: what it holds together, what it keeps apart, and what is left of it."""

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
from collections.abc import Callable
from pathlib import Path

import pytest

from skep.errors import InvalidRequest, SandboxLost, SandboxUnusable
from skep.sandbox.creation import Creation
from skep.sandbox.egress.network import Network
from skep.sandbox.gvisor.house import House
from skep.sandbox.leftovers import records_folder, sweep
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount, Stack
from skep.sandbox.stream import StreamSandbox

SOON_S = 2.0
CONTROLLER = """
import asyncio, os, sys, time
from skep.sandbox.sandbox import Sandbox

async def main():
    sandbox = await Sandbox.create(mechanism="gvisor")
    await sandbox.background("trap '' HUP TERM INT; while :; do sleep 0.01; done")
    if sys.argv[1] == "forked" and os.fork() == 0:
        os.close(1)
        time.sleep(60)
    print(sandbox.id, sandbox.housing.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture(scope="module", autouse=True)
def _runsc() -> None:
    if shutil.which("runsc", path="/usr/local/bin:/usr/bin:/bin") is None:
        reason = "there is no runsc: sudo apt-get install runsc"
        if os.environ.get("CI") and os.geteuid() == 0:
            pytest.fail(reason)
        pytest.skip(reason)


def gvisor(folder: Path | None = None, **options: object) -> Creation:
    return Sandbox.create(folder, mechanism="gvisor", **options)  # type: ignore[arg-type]


def house_of(sandbox: Sandbox) -> House:
    assert isinstance(sandbox, StreamSandbox)
    assert isinstance(sandbox.housing, House)
    return sandbox.housing


def part(sandbox: Sandbox, name: str) -> int:
    """Return the process of runsc's that has a part to play: `gofer` or `sandbox`."""
    children = house_of(sandbox).children()
    (found,) = (pid for pid in children if f"runsc-{name}" in Path(f"/proc/{pid}/cmdline").read_text())
    return found


def eventually(holds: Callable[[], bool], within_s: float = SOON_S) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def started(pid: int) -> str:
    """Return when a process began, or nothing if it is no more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def family(pid: int) -> dict[int, str]:
    """Return a process and all below it, each with when it began: those of the host, not what gVisor shows inside."""
    found, above = {pid: started(pid)}, [pid]
    while above:
        tasks = list(Path(f"/proc/{above.pop()}/task").iterdir())
        below = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        found |= {child: started(child) for child in below}
        above += below
    return found


def gone(processes: dict[int, str]) -> bool:
    return not any(began and started(pid) == began for pid, began in processes.items())


async def test_what_runs_inside_has_another_kernel_and_another_user_than_the_host(tmp_path: Path) -> None:
    async with gvisor() as sandbox:
        release = (await sandbox.run("uname -r")).text.strip()
        assert release != os.uname().release
        uids = Path(f"/proc/{part(sandbox, 'sandbox')}/status").read_text().split("Uid:")[1].split()[:4]
        assert len(set(uids)) == 1
        assert int(uids[0]) == (os.geteuid() or house_of(sandbox).folder.path.stat().st_uid) != 0


async def test_nothing_of_the_host_is_reached_but_the_workspace_and_the_system(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    secret.chmod(0o644)
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "file").write_text("2")
    async with gvisor(read_only={str(tmp_path / "shown"): "/opt/shown"}) as sandbox:
        assert (
            await sandbox.run("cat /opt/shown/file")
        ).text == "2"  # what is shown can be read, so the rest is hidden
        for path in (str(secret), "/etc/shadow", "/root/.bashrc", f"/proc/{os.getpid()}/environ"):
            assert not (await sandbox.run(["cat", path])).ok
        for path in ("/opt/shown/file", "/usr/bin/new", "/etc/passwd", "/run/skep/twin.py", "/new"):
            assert not (await sandbox.run(f"echo x >> {path}")).ok
    assert (tmp_path / "shown" / "file").read_text() == "2"


async def test_the_hosts_loopback_is_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        subprocess.run(["/usr/bin/python3", "-c", program], check=True)
        async with gvisor() as sandbox:
            assert "refused" in (await sandbox.run(["python3", "-c", program])).error_text
            assert (await sandbox.run("grep -c : /proc/net/dev")).text.strip() == "1"


async def test_host_and_inside_see_each_others_changes(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    async with gvisor(folder) as sandbox:
        await sandbox.run("echo inside > file; mkdir folder")
        assert (folder / "file").read_text() == "inside\n"
        (folder / "file").write_text("outside, and longer\n")
        (folder / "folder" / "new").write_text("1")
        assert (await sandbox.run("cat file folder/new")).text == "outside, and longer\n1"
    assert folder.is_dir()


async def test_ls_and_stat_answer_though_gvisor_does_not_know_their_question() -> None:
    async with gvisor() as sandbox:
        listed = await sandbox.run("touch file && ls -la && stat -c '%n %U' file")
        assert listed.ok
        assert listed.text.endswith("file agent\n")


async def test_memory_given_to_tmp_is_all_there_is() -> None:
    async with gvisor(limits=Limits(tmp_bytes=MIB)) as sandbox:
        assert (await sandbox.run("head -c 500000 /dev/zero > /tmp/half")).ok
        assert "No space" in (await sandbox.run("head -c 600000 /dev/zero > /tmp/more")).error_text


async def test_no_more_processes_are_made_than_the_limit() -> None:
    program = "import os\nfor n in range(60):\n    if os.fork() == 0: os.read(0, 1)\n"
    async with gvisor(limits=Limits(processes=20)) as sandbox:
        refused = await sandbox.run(["python3", "-c", program])
        assert "Resource temporarily unavailable" in refused.error_text
        await sandbox.kill_all()
        assert (await sandbox.run("echo fine")).text == "fine\n"


async def test_a_root_file_system_can_be_given(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnusable, match="no Python"):
        await gvisor(options={"rootfs": str(tmp_path)})
    with pytest.raises(InvalidRequest, match="no root file system"):
        await gvisor(options={"rootfs": str(tmp_path / "nowhere")})
    # The host's own is one, too; of it, what only root may read is left out.
    async with gvisor(options={"rootfs": "/"}) as sandbox:
        assert (await sandbox.run("id -un; ls -d /opt /srv")).text.split() == ["agent", "/opt", "/srv"]
        assert (await sandbox.run("cat /etc/debconf.conf /etc/passwd | grep -c agent")).text == "1\n"
        assert not (await sandbox.run("ls /etc/shadow")).ok


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a folder in which nothing may be run")
def test_temporary_folders_may_forbid_programs_devices_and_other_users(tmp_path: Path) -> None:
    program = (
        "import asyncio\n"
        "from skep.sandbox.sandbox import Sandbox\n"
        "async def main():\n"
        "    async with Sandbox.create(mechanism='gvisor') as sandbox:\n"
        "        assert (await sandbox.run('ls -la && id -u', user='root')).text.endswith('0\\n')\n"
        "asyncio.run(main())\n"
    )
    mount = f"mount -t tmpfs -o nosuid,nodev,noexec,mode=1777 none {tmp_path}"
    command = ["unshare", "-m", "sh", "-c", f'{mount} && TMPDIR={tmp_path} exec "$0" -c "$1"', sys.executable, program]
    subprocess.run(command, check=True, timeout=60)


@pytest.mark.parametrize("name", ["runsc", "gofer", "sandbox"])
async def test_a_sandbox_is_lost_soon_after_one_of_its_processes(name: str) -> None:
    sandbox = await gvisor()
    waiting = asyncio.ensure_future(sandbox.run("sleep 1000"))
    await sandbox.run("true")
    processes = family(house_of(sandbox).pid)
    os.kill(house_of(sandbox).pid if name == "runsc" else part(sandbox, name), signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(waiting, SOON_S)
    await sandbox.stop()
    assert not house_of(sandbox).folder.path.exists()
    assert len(processes) > 3
    assert eventually(lambda: gone(processes))


@pytest.mark.parametrize("how", ["alone", "forked"])
def test_a_killed_controller_takes_everything_with_it_and_the_next_one_cleans_up(how: str) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, how], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert controller.stdout is not None
        sandbox_id, pid = controller.stdout.readline().split()
        processes = family(int(pid))
        assert len(processes) > 3
        controller.kill()
        assert eventually(lambda: gone(processes))
        record = records_folder() / f"{sandbox_id}.json"
        assert eventually(lambda: sweep() is not None and not record.exists(), within_s=10.0)
        assert not list(Path("/tmp").glob(f"*{sandbox_id}*"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(controller.pid, signal.SIGKILL)
        controller.communicate()


async def test_what_it_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnusable, match="network"):
        await gvisor(network=Network())
    layers = Stack(str(tmp_path / "upper"), str(tmp_path / "work"), (str(tmp_path),))
    with pytest.raises(SandboxUnusable, match="layers"):
        await gvisor(stack=layers)
    with pytest.raises(SandboxUnusable, match="layers"):
        await gvisor(mounts=[Mount(str(tmp_path), "/workspace/hive")])
    with pytest.raises(SandboxUnusable, match="no /nowhere/runsc"):
        await gvisor(options={"path": "/nowhere/runsc"})
    with pytest.raises(InvalidRequest, match="system"):
        await gvisor(read_only={str(tmp_path): "/usr/tools"})


async def test_a_runsc_that_fails_says_why() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the sandbox's own user has to find it
        broken = Path(folder) / "runsc"
        broken.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
        broken.chmod(0o755)
        with pytest.raises(SandboxUnusable, match="out of order"):
            await gvisor(options={"path": str(broken)})
