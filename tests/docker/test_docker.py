"""What is particular to containers: their images, labels and layers, and the errors of an engine."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.reach import network
from tests.docker.daemon import Daemon, daemon, new_daemon
from tests.docker.sibling import api_of
from tests.sandbox.egress.site import Site, running_site

from skep.errors import InvalidRequest, NotFound, SandboxUnusable, StorageFull, WorkspaceBusy
from skep.sandbox.containers.container import Container
from skep.sandbox.containers.engine import Engine
from skep.sandbox.containers.furniture import FILTER, furnish
from skep.sandbox.containers.images import bare_image
from skep.sandbox.docker import DockerSandbox
from skep.sandbox.joining import join
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.recipe import Recipe
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount, Stack

__all__ = ["daemon"]
pytestmark = pytest.mark.service
AS_USER = Path(__file__).parents[2] / "scripts" / "as-user"


def container(daemon: Daemon, *arguments: Any, **options: Any) -> Any:
    more = options.pop("options", {})
    return Sandbox.create(*arguments, mechanism="docker", options={**daemon.options, **more}, **options)


async def test_a_container_says_whose_it_is(daemon: Daemon) -> None:
    async with container(daemon, labels={"account": "acme", "session": "s-1"}) as sandbox:
        with api_of(daemon) as api:
            (found,) = api.containers(filters={"label": ["skep.account=acme", "skep.session=s-1"]})
        assert found["Labels"]["skep.sandbox"] == sandbox.id
        assert str(os.getpid()) in found["Labels"]["skep.owner"].split()


async def test_the_user_is_named_agent_and_owns_the_workspace(daemon: Daemon, tmp_path: Path) -> None:
    async with container(daemon, tmp_path / "workspace") as sandbox:
        ran = await sandbox.run("touch file; stat -c %U file; id -un; hostname; echo $HOME")
        assert ran.text.split() == ["agent", "agent", "skep", "/workspace"]
    assert (tmp_path / "workspace" / "file").stat().st_uid == (tmp_path / "workspace").stat().st_uid != 0


async def test_a_folder_serves_bubblewrap_and_containers_in_turn(daemon: Daemon, tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    for made in (Sandbox.create(folder), container(daemon, folder), Sandbox.create(folder)):
        async with made as sandbox:
            await sandbox.run(f"echo {sandbox.mechanism} >> log")
    assert (folder / "log").read_text() == "bubblewrap\ndocker\nbubblewrap\n"


# Root file systems


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a root file system with a shell, a few programs and what they need."""
    top = tmp_path_factory.mktemp("rootfs")
    for program in ("/bin/bash", "/bin/cat", "/bin/ls"):
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in (program, *re.findall(r"(/\S+) \(", linked)):
            place = top / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    (top / "own").write_text("of this root\n")
    return top


def images(daemon: Daemon, repository: str) -> list[Any]:
    with api_of(daemon) as api:
        return list(api.images(repository))


async def test_a_root_file_system_is_imported_once_by_what_is_in_it(daemon: Daemon, rootfs: Path) -> None:
    before = len(images(daemon, "skep-rootfs"))
    for _ in range(2):
        async with container(daemon, options={"rootfs": str(rootfs)}) as sandbox:
            ran = await sandbox.run("cat /own; ls / | cat; [ -e /usr/bin/python3 ] || echo alone")
            assert ran.text.startswith("of this root\n")
            assert ran.text.endswith("alone\n")
    assert len(images(daemon, "skep-rootfs")) == before + 1
    (rootfs / "own").write_text("of this root, changed\n")
    async with container(daemon, options={"rootfs": str(rootfs)}) as sandbox:
        assert (await sandbox.run("cat /own")).text == "of this root, changed\n"


async def test_a_tar_file_and_an_image_by_name_serve_too(daemon: Daemon, rootfs: Path, tmp_path: Path) -> None:
    packed = tmp_path / "rootfs.tar"
    with tarfile.open(packed, "w") as archive:
        archive.add(rootfs, arcname=".")
    async with container(daemon, options={"rootfs": str(packed)}) as sandbox:
        assert (await sandbox.run("cat /own")).ok
    with api_of(daemon) as api:
        changes = ["ENV PATH=/opt/bin:/bin", "ENV GREETING=hello"]
        api.import_image_from_data(packed.read_bytes(), repository="named", tag="1", changes=changes)
    async with container(daemon, options={"image": "named:1"}) as sandbox:
        ran = await sandbox.run("echo $GREETING; echo $PATH")
        assert ran.text == "hello\n/workspace/.venv/bin:/workspace/node_modules/.bin:/opt/bin:/bin\n"


async def test_what_cannot_be_a_root_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used as a root file system"):
        await container(daemon, options={"rootfs": str(tmp_path / "missing")})
    with pytest.raises(SandboxUnusable, match="cannot be pulled") as refused:
        await container(daemon, options={"image": "127.0.0.1:1/nothing:here"})
    assert "rootfs" in str(refused.value.hint)
    with api_of(daemon) as api:
        api.import_image_from_data(_tar(), repository="volumes", tag="1", changes=["VOLUME /data"])
    with pytest.raises(InvalidRequest, match="/data in volumes"):
        await container(daemon, options={"image": "volumes:1"})


def _tar() -> bytes:
    out = io.BytesIO()
    tarfile.open(fileobj=out, mode="w").close()
    return out.getvalue()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": "a", "rootfs": "/b"}, "not both"),
        ({"images": "a"}, "images"),
        ({"runtime": "nowhere"}, "runtime"),
    ],
    ids=["two roots", "no such option", "no such runtime"],
)
async def test_options_that_mean_nothing_are_refused(daemon: Daemon, options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        await container(daemon, options=options)


async def test_a_limit_that_the_engine_does_not_take_is_the_callers_mistake(daemon: Daemon) -> None:
    with pytest.raises(InvalidRequest, match=r"[Mm]inimum memory"):
        await container(daemon, limits=Limits(memory_bytes=1 * MIB))
    with api_of(daemon) as api:
        assert api.containers(all=True, filters={"label": "skep.sandbox", "status": "created"}) == []


async def test_a_container_whose_agent_gives_up_says_why(daemon: Daemon, tmp_path: Path) -> None:
    held = Container.plan(await Engine.at(daemon.host))
    try:
        furniture = furnish(
            held.folder, Recipe(), user=(1000, 1000), workspace=str(tmp_path), bare=True, certificate=None
        )
        furniture.show("/dev/null", FILTER)
        image = await bare_image(held.engine, furniture.links)
        with pytest.raises(SandboxUnusable, match="cannot take the system call filter"):
            await held.start(image.name, furniture, Recipe(), None)
    finally:
        await held.end()


async def test_few_open_files_are_for_commands_and_not_for_the_agent(daemon: Daemon) -> None:
    async with container(daemon, limits=Limits(open_files=8)) as sandbox:
        assert (await sandbox.run("ulimit -n")).stdout == b"8\n"


# Layers, other folders, guests and the network


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    for name in ("layer", "top/tree", "top/work"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "layer" / "below").write_text("of the layer\n")
    return Stack(str(tmp_path / "top/tree"), str(tmp_path / "top/work"), (str(tmp_path / "layer"),))


async def test_a_workspace_in_layers_is_the_same_in_a_container(daemon: Daemon, tmp_path: Path, stack: Stack) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "file").write_text("shown\n")
    mounts = [Mount(str(shown), "/workspace/hive"), Mount(str(shown), "/opt/other", "scratch")]
    async with container(daemon, stack=stack, mounts=mounts) as sandbox:
        ran = await sandbox.run("cat below hive/file; echo more >> below; mv below above; echo 1 > /opt/other/file")
        assert ran.text == "of the layer\nshown\n"
        assert not (await sandbox.run("echo 1 > hive/file")).ok
        await sandbox.files.write("own", b"1")
    assert (tmp_path / "layer" / "below").read_text() == "of the layer\n"
    assert (shown / "file").read_text() == "shown\n"
    async with Sandbox.create(stack=stack) as sandbox:
        assert (await sandbox.run("cat above own; ls")).text == "of the layer\nmore\n1above\nhive\nown\n"


async def test_a_container_takes_another_stack_while_nothing_runs(daemon: Daemon, tmp_path: Path, stack: Stack) -> None:
    async with container(daemon, stack=stack) as sandbox:
        await sandbox.run("echo 1 > first")
        for part in ("tree", "work"):
            (tmp_path / "next" / part).mkdir(parents=True)
        owner = Path(stack.upper).stat()
        above = Stack(str(tmp_path / "next/tree"), str(tmp_path / "next/work"), (stack.upper, *stack.layers))
        os.chown(above.upper, owner.st_uid, owner.st_gid)
        job = await sandbox.background("sleep 1000")
        with pytest.raises(WorkspaceBusy):
            await sandbox.restack(above)
        await job.kill()
        await job.wait()
        await sandbox.restack(above)
        assert (await sandbox.run("cat first below; rm first; ls")).text == "1\nof the layer\nbelow\n"
    assert (tmp_path / "top" / "tree" / "first").exists()


async def test_another_process_can_join_a_container(daemon: Daemon) -> None:
    async with container(daemon) as sandbox:
        told = json.loads(json.dumps(sandbox.introduction()))
        async with await join(await sandbox.admit(), told) as guest:
            await guest.run("echo 1 > file")
            assert await sandbox.files.read("file") == b"1\n"
            assert sandbox.guests == 1


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as site:
        yield site


async def test_a_network_is_skeps_own_gate_and_not_the_engines(daemon: Daemon, site: Site) -> None:
    ask = "import urllib.request as u; print(u.urlopen('http://{}/', timeout=5).status)"
    async with container(daemon, network=network(site)) as sandbox:
        allowed = await sandbox.run(["/usr/bin/python3", "-c", ask.format("allowed.test")])
        assert allowed.stdout == b"200\n", allowed
        denied = await sandbox.run(["/usr/bin/python3", "-c", ask.format("denied.test")])
        assert not denied.ok
        direct = await sandbox.run(["/usr/bin/python3", "-c", ask.format(site.address)])
        assert not direct.ok
    assert {seen.host for seen in site.seen} == {"allowed.test"}


async def test_a_server_inside_can_be_reached_from_outside(daemon: Daemon) -> None:
    server = "import socket; s = socket.create_server(('127.0.0.1', 8000)); print('up', flush=True); s.accept()"
    async with container(daemon) as sandbox:
        with pytest.raises(NotFound):
            await sandbox.connect(8000)
        process = await sandbox.start(["/usr/bin/python3", "-c", server])
        assert await process.stdout.read() == b"up\n"
        (await sandbox.connect(8000)).close()
        assert (await process.wait()).code == 0
        process.release()


# An ordinary user

PROGRAM = """
import asyncio, os, sys
from skep import Sandbox
from skep.errors import InvalidRequest
from skep.sandbox.egress.network import Network

async def main():
    options = {"host": sys.argv[1]}
    async with Sandbox.create(mechanism="docker", options=options) as sandbox:
        ran = await sandbox.run("touch file; id -un; stat -c %u file")
        assert ran.text == f"agent\\n{os.getuid()}\\n", ran
        assert await sandbox.files.read("file") == b""
        assert (await sandbox.run("id -u", user="root")).text == "0\\n"
    try:
        await Sandbox.create(mechanism="docker", options=options, network=Network.to("allowed.test"))
    except InvalidRequest as error:
        assert "only root" in error.message

asyncio.run(main())
print("fine")
"""


def test_an_ordinary_user_who_may_use_the_engine_gets_a_sandbox_of_that_user(daemon: Daemon) -> None:
    socket_file = daemon.folder / "sock"
    daemon.folder.chmod(0o711)
    socket_file.chmod(0o666)
    try:
        ran = subprocess.run(
            [AS_USER, sys.executable, "-c", PROGRAM, daemon.host], capture_output=True, text=True, cwd="/", timeout=100
        )
    finally:
        socket_file.chmod(0o600)
    assert ran.stdout == "fine\n", ran.stderr


def test_a_user_who_may_not_use_the_engine_is_told_so(daemon: Daemon) -> None:
    daemon.folder.chmod(0o711)
    ran = subprocess.run(
        [AS_USER, sys.executable, "-c", PROGRAM, daemon.host], capture_output=True, text=True, cwd="/", timeout=100
    )
    assert "SandboxUnusable: this user may not use the Docker engine" in ran.stderr


# Engines that cannot be used


async def test_an_engine_that_is_not_there_or_elsewhere_is_said(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnusable, match="no Docker engine answers"):
        await Sandbox.create(mechanism="docker", options={"host": f"unix://{tmp_path}/sock"})
    with pytest.raises(SandboxUnusable, match="not on this machine"):
        await Sandbox.create(mechanism="docker", options={"host": "tcp://127.0.0.1:2375"})


@contextmanager
def answering(place: Path, **answers: dict[str, Any]) -> Iterator[str]:
    """Serve the few questions that an engine is asked first."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(8)

        def serve() -> None:
            while True:
                try:
                    asked, _ = listener.accept()
                except OSError:
                    return
                with asked:
                    path = asked.recv(4096).split(b" ")[1:2]
                    answer = answers["info"] if path and path[0].endswith(b"/info") else answers["version"]
                    body = json.dumps(answer).encode()
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                    if path:
                        asked.sendall(head.encode() + body)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"unix://{place}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("version", "security", "said"),
    [
        ("1.39", ["name=seccomp,profile=default"], "too old"),
        ("1.41", ["name=seccomp,profile=default", "name=rootless"], "rootless"),
        ("1.41", [], "does not filter system calls"),
    ],
    ids=["old", "rootless", "without seccomp"],
)
async def test_an_engine_that_cannot_hold_a_sandbox_is_refused(
    tmp_path: Path, version: str, security: list[str], said: str
) -> None:
    info = {"NCPU": 2, "SecurityOptions": security}
    with (
        answering(tmp_path / "sock", version={"ApiVersion": version}, info=info) as host,
        pytest.raises(SandboxUnusable, match=said),
    ):
        await Sandbox.create(mechanism="docker", options={"host": host})


async def test_an_engine_without_room_says_so(rootfs: Path) -> None:
    small = new_daemon(size="24m")
    try:
        async with container(small) as sandbox:
            assert isinstance(sandbox, DockerSandbox)
        blob = rootfs / "blob"
        blob.write_bytes(os.urandom(32 * MIB))
        try:
            with pytest.raises(StorageFull, match="no room left"):
                await container(small, options={"rootfs": str(rootfs)})
        finally:
            blob.unlink()
    finally:
        await asyncio.to_thread(small.remove)
