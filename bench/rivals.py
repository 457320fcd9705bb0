"""Other ways to run a command apart from the host, as they are installed here; none is needed to use Skep."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from skep.sandbox.bubblewrap import draw_plan
from skep.sandbox.launcher import Plan
from skep.sandbox.leftovers import records_folder
from skep.sandbox.recipe import Recipe

#: Whether what is missing may be installed; said on the command line.
may_install = False
_WAIT_S = 120
_PROGRAMS = ("/bin/true", "/bin/sleep", "/bin/sh")
_FIRST_FD = 4

_SANDLOCK = """
import sys, time
from sandlock import Sandbox
def make():
    return Sandbox(fs_readable=["/usr", "/lib", "/lib64", "/bin", "/etc", "/dev"], fs_writable=["/tmp"],
                   max_memory="4G", max_processes=512, clean_env=True)
kept = make()
for line in sys.stdin:
    began = time.perf_counter()
    result = (make() if line == "create\\n" else kept).run(["/bin/true"], timeout=30)
    took = time.perf_counter() - began
    print(took if result.success else "failed: " + repr(result), flush=True)
"""


class NotHere(Exception):
    """A rival that cannot be measured on this machine, and why."""


def timed(argv: Sequence[str], **spawning: object) -> float:
    """Run a program to its end and return the seconds it took; one that fails is an error."""
    began = time.perf_counter()
    pid = os.posix_spawnp(argv[0], argv, os.environ, **spawning)  # type: ignore[arg-type]
    _, status = os.waitpid(pid, 0)
    took = time.perf_counter() - began
    if status != 0:
        raise NotHere(f"{' '.join(argv[:4])} … ended with {os.waitstatus_to_exitcode(status)}")
    return took


def quiet() -> list[tuple[int, int, str, int, int]]:
    return [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]


# ---- bwrap by itself --------------------------------------------------------------------------------------------


def raw_bwrap() -> float:
    """Run `true` in a bwrap with the very arguments of a Skep sandbox, without launcher, control groups and agent."""
    plan = draw_plan(Recipe())
    arguments = plan.memory(b"".join(os.fsencode(argument) + b"\0" for argument in _by_descriptor(plan)))
    try:
        for fd in (*plan.fds, arguments):
            if fd >= 0:
                os.set_inheritable(fd, True)
        argv = [str(plan.bwrap.path), "--args", str(arguments), "--", "/bin/true"]
        return timed(argv, file_actions=quiet())
    finally:
        os.close(arguments)
        plan.close()
        if plan.throwaway is not None:
            shutil.rmtree(plan.throwaway[0])


def _by_descriptor(plan: Plan) -> Iterator[str]:
    """Give the arguments with the descriptors' numbers in this process; folders that a launcher shows too."""
    arguments = iter(plan.arguments)
    for argument in arguments:
        match argument:
            case "--file" | "--seccomp" | "--bind-fd" | "--ro-bind-fd":
                yield from (argument, str(plan.fds[int(next(arguments)) - _FIRST_FD]))
            case "--bind" | "--ro-bind":
                source = next(arguments)
                shown = Path(source).parent == records_folder()
                number = plan.fds[int(Path(source).name) - _FIRST_FD] if shown else -1
                yield from (f"{argument}-fd", str(number)) if shown else (argument, source)
            case _:
                yield argument


# ---- container engines ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Docker:
    """A docker engine: how its command is called here."""

    command: list[str]
    container: str = ""

    def create(self) -> float:
        return timed(
            [*self.command, "run", "--rm", "--network", "none", "skep-bench", "/bin/true"], file_actions=quiet()
        )

    def exec(self) -> float:
        return timed([*self.command, "exec", self.container, "/bin/true"], file_actions=quiet())


@contextmanager
def docker(place: Path) -> Iterator[Docker]:
    """Give the engine that runs here, or one started for the benchmark alone where `dockerd` is installed."""
    if may_install and shutil.which("dockerd") is None:
        _install("docker.io")
    if shutil.which("docker") is None:
        raise NotHere("there is no `docker`")
    with ExitStack() as at_end:
        engine = Docker(["docker"])
        if not _answers(engine):
            engine = Docker(at_end.enter_context(_own_engine(place)))
        root = _root_folder(place)
        archive = place / "root.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(root, ".")
        _checked([*engine.command, "import", str(archive), "skep-bench"])
        at_end.callback(_checked, [*engine.command, "rmi", "-f", "skep-bench"])
        started = _checked([*engine.command, "run", "-d", "--network", "none", "skep-bench", "/bin/sleep", "100000"])
        engine.container = started.strip()
        at_end.callback(_checked, [*engine.command, "rm", "-f", engine.container])
        yield engine


@contextmanager
def _own_engine(place: Path) -> Iterator[list[str]]:
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        raise NotHere("no docker engine answers, and none can be started")
    socket = f"unix://{place}/docker.sock"
    folders = ["--data-root", f"{place}/data", "--exec-root", f"{place}/exec", "--pidfile", f"{place}/pid"]
    network = ["--iptables=false", "--ip6tables=false", "--bridge=none"]
    with (place / "dockerd.log").open("w") as log:
        engine = subprocess.Popen(["dockerd", "-H", socket, *folders, *network], stdout=log, stderr=log)
    try:
        command = ["docker", "-H", socket]
        deadline = time.monotonic() + _WAIT_S
        while not _answers(Docker(command)):
            if engine.poll() is not None or time.monotonic() > deadline:
                raise NotHere(f"dockerd does not start: {(place / 'dockerd.log').read_text()[-200:].strip()}")
            time.sleep(0.1)
        yield command
    finally:
        engine.terminate()
        engine.wait()


def _answers(engine: Docker) -> bool:
    asked = [*engine.command, "version", "--format", "{{.Server.Version}}"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


@dataclass(slots=True)
class Gvisor:
    """gVisor's runsc, without an engine above it."""

    command: list[str]
    bundle: Path
    made: int = 0

    def create(self) -> float:
        self.made += 1
        return timed([*self.command, "run", "-bundle", str(self.bundle), f"bench-{self.made}"], file_actions=quiet())

    def exec(self) -> float:
        return timed([*self.command, "exec", "bench-kept", "/bin/true"], file_actions=quiet())


@contextmanager
def gvisor(place: Path) -> Iterator[Gvisor]:
    if may_install and shutil.which("runsc") is None:
        _install("runsc")
    if shutil.which("runsc") is None or os.geteuid() != 0:
        raise NotHere("there is no `runsc`, or no root to run it")
    state = place / "runsc"
    state.mkdir()
    command = ["runsc", "--root", str(state), "--platform", "ptrace", "--network", "none", "--ignore-cgroups"]
    once, kept = _bundle(place / "once", "/bin/true"), _bundle(place / "kept", "/bin/sleep", "100000")
    _checked([*command, "run", "-detach", "-bundle", str(kept), "bench-kept"])
    try:
        yield Gvisor(command, once)
    finally:
        _checked([*command, "kill", "bench-kept", "KILL"])
        _checked([*command, "delete", "-force", "bench-kept"])


def _bundle(place: Path, *argv: str) -> Path:
    place.mkdir()
    process = {"args": list(argv), "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 1000, "gid": 1000}}
    root = {"path": str(_root_folder(place)), "readonly": True}
    spaces = [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]
    content = {
        "ociVersion": "1.0.0",
        "process": process,
        "root": root,
        "hostname": "bench",
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"namespaces": spaces},
    }
    (place / "config.json").write_text(json.dumps(content))
    return place


# ---- sandlock ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sandlock:
    """sandlock, from an interpreter of its own, which measures itself."""

    worker: subprocess.Popen[str]

    def create(self) -> float:
        return self._ask("create")

    def exec(self) -> float:
        return self._ask("exec")

    def _ask(self, what: str) -> float:
        assert self.worker.stdin is not None and self.worker.stdout is not None
        self.worker.stdin.write(f"{what}\n")
        self.worker.stdin.flush()
        answer = self.worker.stdout.readline().strip()
        try:
            return float(answer)
        except ValueError:
            raise NotHere(f"sandlock {answer or 'ended'}") from None


@contextmanager
def sandlock(place: Path) -> Iterator[Sandlock]:
    if not may_install:
        raise NotHere("it is installed for the benchmark only with `--install`")
    _checked([sys.executable, "-m", "venv", str(place / "venv")])
    _checked([str(place / "venv/bin/pip"), "install", "--quiet", "sandlock"])
    worker = subprocess.Popen(
        [str(place / "venv/bin/python"), "-c", _SANDLOCK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Sandlock(worker)
    finally:
        worker.communicate()


# ---- what they share --------------------------------------------------------------------------------------------


def _install(package: str) -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NotHere(f"{package} can be installed only by root on a Debian")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _checked(["apt-get", "install", "-y", "-q", "--no-install-recommends", package], env=environment)


def _checked(argv: Sequence[str], env: dict[str, str] | None = None) -> str:
    # Into files: what a command leaves running may hold a pipe open for ever.
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=said, stderr=complained, env=env, timeout=_WAIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise NotHere(f"{' '.join(argv[:4])} … takes longer than {_WAIT_S} s") from None
        for file in (said, complained):
            file.seek(0)
        if done.returncode != 0:
            raise NotHere(f"{' '.join(argv[:4])} …: {complained.read().strip()[-200:]}")
        return said.read()


def _root_folder(place: Path) -> Path:
    """Make a root file system of three programs of the host and the libraries they need."""
    root = place / "root"
    if root.exists():
        return root
    for program in _PROGRAMS:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        paths = {word for word in listed.split() if word.startswith("/")}
        for path in (program, *paths):
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(path), target)
    for name in ("proc", "dev", "tmp", "etc", "sys"):
        (root / name).mkdir(exist_ok=True)
    return root
