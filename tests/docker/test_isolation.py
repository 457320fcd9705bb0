"""What a container's settings stop, each shown beside a container like it but for that setting, which does not."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.docker.daemon import Daemon, daemon
from tests.docker.sibling import api_of, gets_through, gets_through_in

from skep.sandbox.docker import DockerSandbox
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.sandbox import Sandbox

__all__ = ["daemon"]
pytestmark = pytest.mark.service

ROOT = {"User": "0:0"}
OPEN = {"SecurityOpt": ["no-new-privileges", "seccomp=unconfined"]}
NEW_USER_NAMESPACE = "check(libc.unshare(0x10000000))"


@pytest.fixture
async def sandbox(daemon: Daemon, tmp_path: Path) -> AsyncIterator[DockerSandbox]:
    """Give a small sandbox that is shown a program which becomes root where it may."""
    tools = tmp_path / "tools"
    tools.mkdir()
    shutil.copy("/usr/bin/id", tools / "id")
    (tools / "id").chmod(0o4755)
    limits = Limits(memory_bytes=64 * MIB, processes=32, tmp_bytes=8 * MIB)
    read_only = {str(tools): "/opt/tools"}
    async with Sandbox.create(mechanism="docker", options=daemon.options, limits=limits, read_only=read_only) as made:
        yield cast(DockerSandbox, made)


#: What is tried; the settings under which it is tried, and those with the protection taken away besides.
ATTEMPTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "have a capability": ("assert int(status('CapBnd'), 16)", {}, {"CapDrop": None}),
    "use a capability as root": ("os.chown('/tmp', 12345, 12345)", ROOT, {"CapDrop": None}),
    "become root by a setuid program": (
        "assert subprocess.run(['/opt/tools/id', '-u'], capture_output=True).stdout == b'0\\n'",
        {},
        {"SecurityOpt": ["seccomp=unconfined"], "CapDrop": None},
    ),
    "make a user namespace": (NEW_USER_NAMESPACE, {}, OPEN),
    "set up io_uring": ("check(libc.syscall(425, 1, bytes(120)))", {}, OPEN),
    "make a setuid file": ("open('/workspace/f', 'w').close(); os.chmod('/workspace/f', 0o4755)", {}, OPEN),
    "write to the root": ("open('/etc/planted', 'w').close()", ROOT | {"CapDrop": None}, {"ReadonlyRootfs": False}),
    "write to the host's programs": (
        "open('/opt/tools/planted', 'w').close()",
        ROOT | {"CapDrop": None},
        {"Mounts": "writable"},
    ),
    "start many processes": (
        "[subprocess.Popen(['/bin/sleep', '5']) for _ in range(64)]",
        {},
        {"PidsLimit": 0},
    ),
    "take much memory": ("bytearray(256 << 20)", {}, {"Memory": 0, "MemorySwap": 0}),
    "fill a folder in memory": (
        "os.write(os.open('/tmp/f', os.O_CREAT | os.O_WRONLY), bytes(16 << 20)) == 16 << 20 or sys.exit(1)",
        {"Memory": 0, "MemorySwap": 0},
        {"Tmpfs": {"/tmp": "rw"}},
    ),
    "see the machine's devices in /sys": ("assert os.listdir('/sys')", {}, {"MaskedPaths": []}),
    "read the kernel's interrupts": ("assert open('/proc/interrupts').read()", {}, {"MaskedPaths": []}),
}


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_a_container_cannot(daemon: Daemon, sandbox: DockerSandbox, name: str) -> None:
    lines, settings, weakened = ATTEMPTS[name]
    if weakened.get("Mounts") == "writable":
        weakened = {"Mounts": _writable(daemon, sandbox)}
    assert not gets_through(daemon, sandbox, lines, **settings)
    assert gets_through(daemon, sandbox, lines, **{**settings, **weakened}), "the control is broken"
    assert not await gets_through_in(sandbox, lines)


def _writable(daemon: Daemon, sandbox: DockerSandbox) -> list[dict[str, Any]]:
    with api_of(daemon) as api:
        mounts = api.inspect_container(sandbox.container.name)["HostConfig"]["Mounts"]
    return [{**mount, "ReadOnly": mount["Target"] != "/opt/tools"} for mount in mounts]


async def test_a_container_reaches_no_network(daemon: Daemon, sandbox: DockerSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        lines = f"socket.create_connection({server.getsockname()!r}, 5)"
        assert not gets_through(daemon, sandbox, lines)
        assert gets_through(daemon, sandbox, lines, NetworkMode="host", UTSMode=""), "the control is broken"
        assert not await gets_through_in(sandbox, lines)


async def test_nobody_inside_can_call_the_controller_again(daemon: Daemon, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    call = "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect({!r})"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        folder = os.open(shown, os.O_PATH)
        listener.bind(f"/proc/self/fd/{folder}/control")
        os.close(folder)
        (shown / "control").chmod(0o666)
        listener.listen(1)
        async with Sandbox.create(
            mechanism="docker", options=daemon.options, read_only={str(shown): "/opt/shown"}
        ) as sandbox:
            assert await gets_through_in(cast(DockerSandbox, sandbox), call.format("/opt/shown/control"))
            assert not await gets_through_in(cast(DockerSandbox, sandbox), call.format("/run/skep/call/control"))


@pytest.mark.parametrize("lines", ["reaches(457, 0)", "check(libc.personality(0x40000))"], ids=["newer", "personality"])
async def test_the_agents_own_filter_holds_what_the_engines_profile_cannot_say(
    daemon: Daemon, sandbox: DockerSandbox, lines: str
) -> None:
    assert gets_through(daemon, sandbox, lines), "the control is broken"
    assert not await gets_through_in(sandbox, lines)
