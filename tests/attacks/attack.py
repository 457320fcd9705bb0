"""An attempt on a sandbox as data: what it tries inside, and what has to be taken away for it to succeed.

The attempt is a few lines of Python. It ends well if it got through; an error of the system (`OSError`) or a failed
`assert` means that it was held. Anything else is a broken attempt and fails the test. A process killed by the filter
(SIGSYS) was held too.

Every attempt comes with a control: the same lines under a plain bwrap (`Plain`), or in a sandbox of ours with one
protection taken away (`Weakened`). Only an attempt that gets through there shows anything when it is held here.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import struct
import subprocess
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import skep.sandbox
from skep.sandbox import seccomp
from skep.sandbox.binary import Bwrap
from skep.sandbox.bubblewrap import BubblewrapSandbox, draw_plan
from skep.sandbox.launcher import Plan
from skep.sandbox.limits import Limits
from skep.sandbox.recipe import Recipe
from skep.sandbox.sandbox import Sandbox

IS_ROOT = os.geteuid() == 0
PYTHON = "/usr/bin/python3"
DEADLINE_S = 20.0
#: What stands in a file of the host that no attack may show or change.
SECRET = "of the host\n"

#: A filter that lets everything pass: the agent does not serve without one.
OPEN_FILTER = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)

#: Numbers that the filter does not name because it was written before them; the same on every processor.
_NEWER = {"fchmodat2": 452, "statmount": 457, "listmount": 458}

_PRELUDE = """
import ctypes, errno, fcntl, os, signal, socket, stat, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def call(name, *arguments):
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result = libc.syscall(ctypes.c_long(NR[name] if isinstance(name, str) else name), *words)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def reaches(name, *arguments, refusal=errno.EPERM):
    # The kernel has looked at the call if its answer is not the filter's own.
    try:
        call(name, *arguments)
    except OSError as error:
        if error.errno == refusal:
            raise

def forked(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child
"""


def numbers() -> dict[str, int]:
    """Return the numbers of the calls that attempts speak of, on this machine."""
    architecture = seccomp.ARCHITECTURES[platform.machine()]
    closed = {name: pair[architecture.column] for name, pair in seccomp.CLOSED.items()}
    return {name: number for name, number in {**closed, **architecture.numbers, **_NEWER}.items() if number is not None}


def program(attempt: str, **given: object) -> str:
    """Return a whole Python program from an attempt; what is `given` are its global names."""
    names = "".join(f"{name} = {value!r}\n" for name, value in given.items())
    body = textwrap.indent(textwrap.dedent(attempt).strip(), "    ")
    return (
        f"{_PRELUDE}\nNR = {numbers()!r}\n{names}\ndef attempt():\n{body}\n\n"
        "try:\n    attempt()\nexcept (OSError, AssertionError) as error:\n    print('HELD', repr(error))\n"
        "else:\n    print('THROUGH')\n"
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether an attempt got through, and what it said."""

    through: bool
    said: str

    @classmethod
    def read(cls, said: str, *, killed_by: int | None = None) -> Outcome:
        last = (said.strip().splitlines() or [""])[-1]
        if last.startswith("THROUGH"):
            return cls(True, said)
        if last.startswith("HELD") or killed_by == signal.SIGSYS:
            return cls(False, said)
        raise AssertionError(f"the attempt is broken (signal {killed_by}): {said}")

    @property
    def lacking(self) -> bool:
        """The kernel itself has no such thing."""
        return not self.through and ("not implemented" in self.said or "Address family not supported" in self.said)


@dataclass(frozen=True, slots=True)
class Plain:
    """A plain `bwrap --unshare-all`, with more or fewer options, of the same version as ours."""

    options: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ("--unshare-all",)

    async def outcome(self, text: str, folder: Path) -> Outcome:
        child = await asyncio.create_subprocess_exec(
            *self.command(folder), PYTHON, "-c", text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said, _ = await asyncio.wait_for(child.communicate(), DEADLINE_S)
        status = child.returncode or 0
        return Outcome.read(said.decode(errors="replace"), killed_by=status - 128 if status > 128 else None)

    def command(self, folder: Path) -> list[str]:
        links = [
            word
            for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
            if os.path.lexists(path)
            for word in (
                ("--symlink", str(Path(path).readlink()), path)
                if Path(path).is_symlink()
                else ("--ro-bind", path, path)
            )
        ]
        return [
            str(Bwrap.find().path), *self.namespaces, "--ro-bind", "/usr", "/usr", *links, "--ro-bind", "/etc", "/etc",
            "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--bind", str(folder), "/workspace",
            "--chdir", "/workspace", *self.options, "--",
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weakened:
    """Our own sandbox with one protection taken away."""

    #: Calls that the filter leaves alone; "*" for a filter that lets everything pass.
    leave_open: tuple[str, ...] = ()
    #: Pieces of the agent's source, and what they are replaced by before it is built.
    agent: tuple[tuple[str, str], ...] = ()
    limits: Limits = field(default_factory=Limits)

    @asynccontextmanager
    async def sandbox(self, folder: str | None = None) -> AsyncIterator[BubblewrapSandbox]:
        recipe = Recipe(folder=folder, limits=self.limits)
        allowed = OPEN_FILTER if "*" in self.leave_open else seccomp.assemble(leave_open=self.leave_open)
        plan = draw_plan(recipe, filter_program=allowed)
        if self.agent:
            _swap_agent(plan, built_agent(self.agent))
        async with await BubblewrapSandbox.start_from(recipe, plan=plan) as sandbox:
            yield sandbox

    async def outcome(self, text: str, _folder: Path) -> Outcome:
        async with self.sandbox() as sandbox:
            return await outcome_in(sandbox, text)


@dataclass(frozen=True, slots=True)
class Attack:
    """One attempt with its control.

    `needs_root` says why it means something only when Skep runs as root, `needs` names a file of the host without
    which there is nothing to attack.
    """

    name: str
    attempt: str
    control: Plain | Weakened
    needs_root: str | None = None
    needs: str | None = None
    given: Mapping[str, object] = field(default_factory=dict)

    async def is_held(self, sandbox: Sandbox, folder: Path) -> None:
        """Assert that the attempt gets through with the protection off, and not in the sandbox."""
        if self.needs_root and not IS_ROOT:
            pytest.skip(f"means something only as root: {self.needs_root}")
        if self.needs and not Path(self.needs).exists():
            pytest.skip(f"this host has no {self.needs}")
        text = program(self.attempt, **self.given)
        control = await self.control.outcome(text, folder)
        if control.lacking:
            pytest.skip(f"this kernel has nothing to attack: {control.said.strip()}")
        assert control.through, f"the control is held, so the attempt shows nothing: {control.said}"
        ours = await outcome_in(sandbox, text)
        assert not ours.through, f"{self.name} got through: {ours.said}"


def each(attacks: list[Attack]) -> pytest.MarkDecorator:
    """Run a test once per attack."""
    return pytest.mark.parametrize("attack", attacks, ids=lambda attack: attack.name)


async def outcome_in(sandbox: Sandbox, text: str, **options: Any) -> Outcome:
    """Run a program in a sandbox and read how its attempt went."""
    ran = await sandbox.run([PYTHON, "-c", text], timeout_s=DEADLINE_S, **options)
    return Outcome.read(ran.text + ("\n" + ran.error_text if ran.stderr else ""), killed_by=ran.exit.signal)


async def soon(condition: Callable[[], bool], within_s: float = 2.0) -> bool:
    """Wait until something holds, no longer than given."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def host_processes(mark: str) -> list[int]:
    """Return the processes of the host, those in sandboxes among them, that have a mark in their arguments.

    The newest are looked at first: what forks on lives for milliseconds, and would be gone by the time of the last.
    """
    found = []
    for pid in sorted((int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()), reverse=True):
        try:
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def built_agent(changes: tuple[tuple[str, str], ...]) -> Path:
    """Build the native agent with pieces of its source replaced."""
    return built("agent", changes)


@cache
def built(name: str, changes: tuple[tuple[str, str], ...]) -> Path:
    """Build a native program with pieces of its source replaced."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the control needs a C compiler to build a weakened program")
    source = (Path(skep.sandbox.__file__).parent / "native" / f"{name}.c").read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"the source of {name} has changed: {old!r}"
        source = source.replace(old, new)
    folder = Path(tempfile.mkdtemp(prefix="skep-weak-"))
    folder.chmod(0o755)
    _built.append(folder)
    (folder / "source.c").write_text(source)
    subprocess.run([compiler, "-O1", "-static", "-o", folder / name, folder / "source.c"], check=True)
    return folder / name


_built: list[Path] = []


def remove_built() -> None:
    while _built:
        shutil.rmtree(_built.pop())


def _swap_agent(plan: Plan, agent: Path) -> None:
    source = plan.arguments[plan.arguments.index("/run/skep/agent") - 1]
    place = plan.fds.index(next(fd for fd in plan.fds if plan.number(fd) == int(source.rpartition("/")[2])))
    os.close(plan.fds[place])
    plan.fds[place] = os.open(agent, os.O_PATH | os.O_CLOEXEC)
