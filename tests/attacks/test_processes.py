"""What a command can do to other processes: the agent, the controller, the host's, and commands beside it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from tests.attacks.attack import (
    DEADLINE_S,
    PYTHON,
    Attack,
    Plain,
    Weakened,
    each,
    outcome_in,
    program,
)

from skep.errors import InvalidRequest, LimitReached
from skep.sandbox.limits import Limits
from skep.sandbox.probe import landlock_abi
from skep.sandbox.sandbox import Sandbox

#: An agent that its neighbours may look into, like any other process of their user.
DUMPABLE = ("prctl(PR_SET_DUMPABLE, 0)", "prctl(PR_SET_DUMPABLE, 1)")
#: Without a Landlock domain for each command; with one, the agent is out of reach twice over.
UNFENCED = ("    fence = make_fence();\n", "")
OPEN_AGENT = Weakened(agent=(DUMPABLE, UNFENCED))
#: No process namespace, as with a bwrap that is given too few options.
SAME_PROCESSES = Plain(namespaces=("--unshare-user", "--unshare-net"))

AGENT = [
    Attack("read the agent's environment", "open('/proc/1/environ', 'rb').read()", OPEN_AGENT),
    Attack("read the agent's memory", "open('/proc/1/mem', 'rb')", OPEN_AGENT),
    Attack("write the agent's memory", "os.open('/proc/1/mem', os.O_WRONLY)", OPEN_AGENT),
    Attack("list the agent's descriptors", "assert '3' in os.listdir('/proc/1/fd')", OPEN_AGENT),
    Attack("open what the agent has open", "os.open('/proc/1/fd/0', os.O_RDONLY)", OPEN_AGENT),
    Attack("walk through the agent's root", "os.listdir('/proc/1/root/')", OPEN_AGENT),
    Attack(
        "protect oneself by the agent's memory score", "open('/proc/1/oom_score_adj', 'w').write('1000')", OPEN_AGENT
    ),
    Attack(
        "replace the agent's program",
        "os.open('/run/skep/agent', os.O_WRONLY | os.O_CREAT)",
        Plain(("--dir", "/run/skep")),
    ),
    Attack(
        "shrink the agent's limits until it fails",
        "import resource; resource.prlimit(1, resource.RLIMIT_STACK, (1 << 20, 1 << 20))",
        Weakened(leave_open=("prlimit64",)),
    ),
    Attack(
        "the launcher's arguments, which name folders of the host",
        "assert b'--' in open('/proc/1/cmdline', 'rb').read()",
        Plain(),
    ),
]


@each(AGENT)
async def test_the_agent_is_out_of_reach(attack: Attack, sandbox: Sandbox, tmp_path: Path) -> None:
    await attack.is_held(sandbox, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV, signal.SIGRTMIN])
async def test_the_agent_does_not_hear_signals_from_inside(number: int, sandbox: Sandbox) -> None:
    """Any other process of the same user is ended or halted by them."""
    neighbour = await sandbox.start(["/bin/sleep", "60"])
    await sandbox.run(["/bin/kill", f"-{number}", str(neighbour.pid), "1"])
    async with asyncio.timeout(DEADLINE_S):
        if number == signal.SIGSTOP:
            while await _state(sandbox, neighbour.pid) != "T":
                await asyncio.sleep(0.01)
        else:
            assert (await neighbour.wait()).signal == number
        assert await _state(sandbox, 1) in ("S", "R")
    neighbour.release()


async def _state(sandbox: Sandbox, pid: int) -> str:
    return (await sandbox.run(["/usr/bin/cut", "-d ", "-f3", f"/proc/{pid}/stat"])).text.strip()


async def test_secrets_of_the_launcher_are_not_in_the_environment_of_pid_1(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bwrap's own --clearenv clears the environment of the command, not its own."""
    monkeypatch.setenv("SKEP_ATTACK_SECRET", "hunter2")
    text = program("assert b'hunter2' in open('/proc/1/environ', 'rb').read()")
    assert (await Plain(("--clearenv",)).outcome(text, tmp_path)).through
    async with Sandbox.create() as fresh:
        assert not (await outcome_in(fresh, text)).through
        everything = await fresh.run("cat /proc/*/environ; env", env={"SEEN": "1"})
    assert b"SEEN" in everything.stdout
    assert b"hunter2" not in everything.stdout


async def test_the_controller_cannot_be_found_read_or_signalled(sandbox: Sandbox, tmp_path: Path) -> None:
    """A process of the same user, known by its arguments, stands for the controller."""
    text = program(
        """
        wanted = b'\\0'.join(arguments) + b'\\0'
        found = []
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try:
                found += [int(pid)] if open(f'/proc/{pid}/cmdline', 'rb').read() == wanted else []
            except OSError:
                pass  # it ended meanwhile
        assert found, 'there is no such process here'
        os.kill(found[0], 0)
        """,
        arguments=[b"/bin/sleep", f"60.{os.getpid()}".encode()],
    )
    host = subprocess.Popen(["/bin/sleep", f"60.{os.getpid()}"])
    try:
        assert (await SAME_PROCESSES.outcome(text, tmp_path)).through
        assert not (await outcome_in(sandbox, text)).through
    finally:
        host.kill()
        host.wait()


FORGER = """
control = call('pidfd_getfd', os.pidfd_open(1), 3, 0)
socket.socket(fileno=control).send(struct.pack('=IIiiQQQ', 4, order, 0, 0, 0, 0, 0))
"""


async def _forged(sandbox: Sandbox) -> bool:
    """Let one command say of another, which runs on, that it has ended well; return whether that was believed."""
    victim = await sandbox.start(["/bin/sleep", "60"])
    outcome = await outcome_in(sandbox, program(FORGER, order=int(victim.id[1:])))
    victim.release()
    return outcome.through and victim.exit is not None and victim.exit.code == 0


async def test_the_end_of_another_command_cannot_be_forged(sandbox: Sandbox) -> None:
    async with Weakened(agent=(DUMPABLE, UNFENCED), leave_open=("pidfd_getfd",)).sandbox() as weak:
        assert await _forged(weak)
    assert not await _forged(sandbox)


RACER = """
seen, deadline = set(), time.monotonic() + 15
while time.monotonic() < deadline and not os.path.exists('/workspace/enough'):
    for name in os.listdir('/proc'):
        if name.isdigit() and name != '1' and name not in seen:
            try:
                program = os.readlink(f'/proc/{name}/exe')
                if program == '/run/skep/agent':
                    os.listdir(f'/proc/{name}/fd')
                    return
                seen.add(name)
            except OSError:
                pass
raise OSError('no child was open before it became a command')
"""


async def _race(sandbox: Sandbox) -> bool:
    """Start many commands beside a racer that looks for one that is still the agent's child."""
    racer = asyncio.create_task(outcome_in(sandbox, program(RACER)))
    for _ in range(40):
        if racer.done():
            break
        await sandbox.run(["/bin/true"])
    await sandbox.files.write("enough", b"")
    return (await racer).through


async def test_a_command_that_is_being_started_cannot_be_caught() -> None:
    """Between fork and exec a child has the agent's memory and descriptors."""
    slow = ("    setsid();\n    if (terminal) {", "    usleep(20000);\n    setsid();\n    if (terminal) {")
    async with Weakened(agent=(DUMPABLE, UNFENCED, slow)).sandbox() as open_sandbox:
        assert await _race(open_sandbox)
    async with Weakened(agent=(UNFENCED, slow)).sandbox() as slow_sandbox:
        assert not await _race(slow_sandbox)


HALTER = """
open('up', 'w').close()
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except OSError:
        pass
"""


async def _answers(sandbox: Sandbox, *, within_s: float, tries: int) -> bool:
    """Say whether every order is answered while somebody inside halts whatever starts."""
    halter = await sandbox.start([PYTHON, "-c", program(HALTER)])
    while "up" not in [entry.name for entry in await sandbox.files.list()]:
        await asyncio.sleep(0.01)
    try:
        for _ in range(tries):
            with contextlib.suppress(LimitReached):
                (await asyncio.wait_for(sandbox.start(["/bin/true"]), within_s)).release()
    except TimeoutError:
        return False
    finally:
        halter.release()
    return True


async def test_halting_whatever_starts_does_not_halt_the_agent() -> None:
    """A child that is stopped before it becomes the command must not be waited for."""
    deaf = ("hear(errors[0], pid, word) == sizeof word", "read(errors[0], word, sizeof word) == sizeof word")
    unused = ("static ssize_t hear(", "__attribute__((unused)) static ssize_t hear(")
    async with Weakened(agent=(deaf, unused)).sandbox() as weak:
        assert not await _answers(weak, within_s=1, tries=200)
    async with Sandbox.create() as sandbox:
        assert await _answers(sandbox, within_s=DEADLINE_S, tries=10)


async def test_output_that_looks_like_the_protocol_is_only_output(sandbox: Sandbox) -> None:
    """In a shell that is kept on a pipe, a program that prints the end marker ends its command with it."""
    forged = "printf 'MARK 0\\n'; exit 3"
    naive = subprocess.run(
        ["/bin/bash"], input=f"({forged})\necho MARK $?\n", capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert naive.stdout.splitlines()[0] == "MARK 0"
    records = "b''.join(struct.pack('=IIiiQQQ', 4, order, 0, 0, 0, 0, 0) for order in range(9))"
    ran = await sandbox.run(
        [PYTHON, "-c", f"import os, struct; [os.write(fd, {records}) for fd in (1, 2)]; os._exit(3)"]
    )
    assert ran.exit.code == 3
    assert len(ran.stdout) == len(ran.stderr) == 9 * 40
    shell = await sandbox.shell()
    assert (await shell.run(forged)).exit.code == 3


async def test_a_daemon_that_holds_the_pipes_does_not_hold_the_caller(sandbox: Sandbox) -> None:
    daemon = "sleep 30 & echo $!"
    with subprocess.Popen(["/bin/bash", "-c", daemon], stdout=subprocess.PIPE) as naive:
        with pytest.raises(subprocess.TimeoutExpired) as held:
            naive.communicate(timeout=0.5)
        os.kill(int(held.value.output), signal.SIGKILL)
    ran = await asyncio.wait_for(sandbox.run(daemon), DEADLINE_S)
    assert ran.ok
    assert ran.text.strip().isdigit()


async def test_closed_and_doubled_descriptors_change_nothing(sandbox: Sandbox) -> None:
    """A program may close its own, or stuff them; how it ended is told by the kernel."""
    closed = await sandbox.run("exec 0<&- 1>&- 2>&-; exit 7")
    assert closed.exit.code == 7
    doubled = await sandbox.run('for i in $(seq 10 60); do eval "exec $i>&1"; done; echo out >&60; exit 8')
    assert (doubled.text, doubled.exit.code) == ("out\n", 8)
    assert (await sandbox.run("echo again > /dev/stdout")).text == "again\n"


@pytest.mark.parametrize("name", ["LD_PRELOAD", "BASH_ENV", "PATH", "PYTHONSTARTUP", "PROMPT_COMMAND"])
async def test_a_variable_set_by_one_command_is_not_there_for_the_next(name: str, sandbox: Sandbox) -> None:
    """Given by the caller it does work, so it would matter."""
    await sandbox.run(f"export {name}=/workspace/evil; env | grep -q {name}=/workspace/evil")
    assert "/workspace/evil" not in (await sandbox.run(["/usr/bin/env"])).text
    given = await sandbox.run(["/usr/bin/env"], env={name: "/workspace/evil"})
    assert f"{name}=/workspace/evil" in given.text


async def test_a_preloaded_library_stays_a_matter_of_its_command(sandbox: Sandbox) -> None:
    """The agent, which runs outside of what the caller's variables reach, goes on as before."""
    hostile = {"LD_PRELOAD": "/workspace/evil.so", "BASH_ENV": "/workspace/evil.sh", "LD_LIBRARY_PATH": "/workspace"}
    await sandbox.files.write("evil.sh", b"echo taken\n")
    assert (await sandbox.run("true", env=hostile)).text == "taken\n"
    assert (await sandbox.run("echo fine")).text == "fine\n"
    assert "evil" not in (await sandbox.run("cat /proc/1/maps /proc/1/cmdline 2>&1")).text


@pytest.mark.parametrize("argument", ["one\ntouch planted", "$(touch planted)", "; touch planted", "`touch planted`"])
async def test_an_argument_is_never_read_as_a_command(argument: str, sandbox: Sandbox, tmp_path: Path) -> None:
    subprocess.run(f"echo {argument}", shell=True, cwd=tmp_path, capture_output=True)
    assert (tmp_path / "planted").exists()
    assert (await sandbox.run(["/bin/echo", argument])).text == argument + "\n"
    assert not [entry for entry in await sandbox.files.list() if entry.name == "planted"]


@pytest.mark.parametrize(
    "command",
    [["/bin/echo", "a\0b"], ["/bin/echo", "\ud800"], ["/bin/echo", "x" * (1 << 18)], ["/bin/echo", *["y"] * (1 << 20)],
     ["/bin/echo", "x" * (65 << 20)], [], [""]],
    ids=["NUL", "not text", "256 KiB in one", "a million", "65 MiB", "nothing", "empty name"],
)  # fmt: skip
async def test_a_command_that_cannot_be_is_refused_and_the_next_one_runs(command: list[str], sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest):
        await sandbox.run(command)
    assert (await sandbox.run(["/bin/echo", "x" * (1 << 16)])).ok


@pytest.mark.parametrize("env", [{"A\0": "b"}, {"A": "b\0"}, {"A=B": "c"}, {"": "c"}], ids=repr)
async def test_a_variable_that_cannot_be_is_refused(env: dict[str, str], sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest):
        await sandbox.run("true", env=env)
    assert (await sandbox.run("true", env={"A": "b=c\nd"})).ok


TERMINAL_THIEF = "os.write(os.open('/dev/tty', os.O_RDWR | os.O_NOCTTY), b'x')"


def _on_a_terminal(command: list[str]) -> str:
    """Run a command whose controlling terminal is one of ours; return what it printed to its standard output."""
    master, slave = pty.openpty()

    def adopt() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    try:
        ran = subprocess.run(
            command, preexec_fn=adopt, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
        )
        return ran.stdout
    finally:
        os.close(slave)
        os.close(master)


def test_the_terminal_of_the_caller_is_out_of_reach(tmp_path: Path) -> None:
    text = program(TERMINAL_THIEF)
    assert "THROUGH" in _on_a_terminal([*Plain().command(tmp_path), PYTHON, "-c", text])
    controller = (
        "import sys\nfrom skep.sandbox.sandbox import Sandbox\n"
        f"with Sandbox.create() as sandbox:\n    print(sandbox.run([{PYTHON!r}, '-c', {text!r}]).text)\n"
    )
    environment = f"PYTHONPATH={shlex.quote(':'.join(path for path in sys.path if path))}"
    said = _on_a_terminal(["/usr/bin/env", environment, sys.executable, "-c", controller])
    assert "HELD" in said and "THROUGH" not in said, said


@pytest.mark.parametrize(
    ("limits", "attempt"),
    [
        (Limits(open_files=256), "files = [os.open('/dev/null', os.O_RDONLY) for _ in range(1000)]"),
        (Limits(disk_bytes=32 << 20), "f = open('f', 'wb'); f.truncate(1 << 30)"),
        (Limits(tmp_bytes=16 << 20), "f = open('/tmp/f', 'wb'); f.write(bytes(64 << 20)); f.flush()"),
        (Limits(shm_bytes=16 << 20), "f = open('/dev/shm/f', 'wb'); f.write(bytes(64 << 20)); f.flush()"),
        (Limits(cache_bytes=16 << 20), "f = open('/cache/f', 'wb'); f.write(bytes(64 << 20)); f.flush()"),
    ],
    ids=["descriptors", "a sparse file", "/tmp", "/dev/shm", "/cache"],
)
async def test_no_more_is_had_than_the_limit(limits: Limits, attempt: str) -> None:
    """Under wider limits the same attempt gets through."""
    text = program(f"signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{attempt}")
    async with Sandbox.create(limits=Limits(shm_bytes=128 << 20)) as roomy:
        assert (await outcome_in(roomy, text)).through
    async with Sandbox.create(limits=limits) as sandbox:
        assert not (await outcome_in(sandbox, text)).through


async def test_a_limit_of_a_command_cannot_be_raised_by_it(sandbox: Sandbox) -> None:
    """To lower it is anybody's right."""
    attempt = "call('prlimit64', 0, 7, struct.pack('=QQ', wanted, wanted), 0)"
    assert (await outcome_in(sandbox, program(attempt, wanted=64))).through
    assert not (await outcome_in(sandbox, program(attempt, wanted=sandbox.limits.open_files + 1))).through


async def test_processes_of_the_host_are_not_listed(sandbox: Sandbox, tmp_path: Path) -> None:
    """Inside there is the agent, and what was started there."""
    text = program("assert len([pid for pid in os.listdir('/proc') if pid.isdigit()]) > 2")
    assert (await SAME_PROCESSES.outcome(text, tmp_path)).through
    assert not (await outcome_in(sandbox, text)).through


async def _reached(sandbox: Sandbox) -> list[str]:
    """Let one command reach for another by /proc; return what it got hold of."""
    victim = await sandbox.start(["/bin/sh", "-c", "read line; echo mine"], stdin=True, env={"TOKEN": "private"})
    place = f"/proc/{victim.pid}"
    tried = await sandbox.run(f"echo forged > {place}/fd/1; cat {place}/environ; : > {place}/mem && echo wrote")
    await victim.write(b"\n")
    said = b"".join([chunk async for chunk in victim.stdout])
    victim.release()
    assert b"mine" in said
    found = {"output": b"forged" in said, "environment": b"private" in tried.stdout, "memory": b"wrote" in tried.stdout}
    return [name for name, got in found.items() if got]


async def test_a_command_reaches_neither_output_nor_environment_nor_memory_of_another(sandbox: Sandbox) -> None:
    if landlock_abi() < 2:
        pytest.skip("this kernel has no Landlock that can be used; docs/threats.md says what is then open")
    async with Weakened(agent=(UNFENCED,)).sandbox() as open_sandbox:
        assert await _reached(open_sandbox) == ["output", "environment", "memory"]
    assert await _reached(sandbox) == []
