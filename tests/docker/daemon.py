"""A Docker engine of the tests' own: its own folders, socket and containerd, and nothing of the machine's."""

from __future__ import annotations

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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

START_S = 60.0
STOP_S = 30.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(slots=True)
class Daemon:
    """One engine, which can be stopped, killed and started again over the same folders, beside its containerd."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    containerd: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/sock"

    @property
    def options(self) -> dict[str, Any]:
        """What `Sandbox.create` needs to find it."""
        return {"host": self.host}

    def start(self) -> None:
        if self.containerd is None:
            self.containerd = self._run("containerd", *self._containerd_arguments())
            self._await(self.containerd, (self.folder / "containerd.sock").exists)
        self.process = self._run("dockerd", *self._arguments())
        self._await(self.process, self.answers)

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        path = shutil.which(program, path=_PATH)
        assert path is not None
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARDED, path, *arguments],
                stdin=subprocess.PIPE,  # closes when the tests die, however they do
                stdout=log,
                stderr=log,
                env={"PATH": _PATH},
                start_new_session=True,
            )

    def _await(self, process: subprocess.Popen[bytes], holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not holds():
            ended = process.poll()
            assert ended is None, f"{process.args!r} ended with {ended}: {self.said()}"
            assert time.monotonic() < deadline, f"{process.args!r} does not answer: {self.said()}"
            time.sleep(0.02)

    def _containerd_arguments(self) -> list[str]:
        config = self.folder / "containerd.toml"
        config.write_text('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
        places = {"root": "containerd", "state": "state", "address": "containerd.sock", "config": config.name}
        return [f"--{option}={self.folder}/{place}" for option, place in places.items()]

    def _arguments(self) -> list[str]:
        places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid", "containerd": "containerd.sock"}
        return [
            *(f"--{option}={self.folder}/{place}" for option, place in places.items()),
            f"--host={self.host}",
            # Nothing of the machine's network is touched; a sandbox has none of it anyway.
            *("--bridge=none", "--iptables=false", "--ip-masq=false", "--ip-forward=false"),
            *("--exec-opt=native.cgroupdriver=cgroupfs", "--shutdown-timeout=5"),
        ]

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as door:
            door.settimeout(5)
            door.connect(f"{self.folder}/sock")
            door.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in door.recv(64)
        return False

    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the engine; its containerd goes on, as it does where systemd starts both."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.communicate(timeout=STOP_S)

    def remove(self) -> None:
        """Stop it and leave nothing behind."""
        for process in (self.process, self.containerd):
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.terminate()
                    process.communicate(timeout=STOP_S)
        for mount in reversed(_mounts_below(self.folder)):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


#: Become a program that is ended when standard input closes: a child of it watches, and goes with it.
_GUARDED = """
import os, select, signal, sys
program = os.getpid()
watched = os.pidfd_open(program)
if os.fork() == 0:
    os.setsid()
    ready = select.poll()
    ready.register(0, 0)
    ready.register(watched, select.POLLIN)
    if all(fd == 0 for fd, _ in ready.poll()):
        signal.pidfd_send_signal(watched, signal.SIGTERM)
    os._exit(0)
null = os.open(os.devnull, os.O_RDONLY)
os.dup2(null, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def _mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [point for line in lines if (point := line.split(" ")[4]).startswith(f"{folder}/")]


def require_docker() -> None:
    """Skip where there can be no engine; in CI, as root, its absence is a failure."""
    if os.geteuid() != 0:
        pytest.skip("only root can start an engine: run the tests as root")
    if shutil.which("dockerd", path=_PATH) is None:
        reason = "there is no dockerd: sudo apt-get install docker.io"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


def new_daemon(*, size: str | None = None) -> Daemon:
    """Start an engine, with so much room if that is given; whoever asks removes it."""
    require_docker()
    # Short: the sockets of containerd's shims lie below it, and their addresses have room for 107 characters.
    daemon = Daemon(Path(tempfile.mkdtemp(prefix="skep-dk-", dir="/tmp")))
    try:
        if size is not None:
            (daemon.folder / "data").mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "small", daemon.folder / "data"], check=True)
        daemon.start()
    except BaseException:
        daemon.remove()
        raise
    return daemon


@cache
def _shared() -> Daemon:
    return new_daemon()


@pytest.fixture(scope="session")
def daemon(pytestconfig: pytest.Config) -> Daemon:
    """Give the engine that all tests of this process share, started by the first that asks."""
    require_docker()
    started = _shared.cache_info().currsize == 0
    found = _shared()
    if started:
        pytestconfig.add_cleanup(found.remove)
    return found
