"""The sandbox for code that does not use asyncio."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.programs import started

from skep.errors import InvalidRequest, NotFound, SandboxLost
from skep.sandbox.blocking import BlockingSandbox
from skep.sandbox.limits import CommandLimits
from skep.sandbox.sandbox import Sandbox


@pytest.fixture
def sandbox() -> Iterator[BlockingSandbox]:
    with Sandbox.create() as made:
        yield made


def test_commands_run(sandbox: BlockingSandbox) -> None:
    result = sandbox.run("cat; echo $X; pwd; exit 3", input=b"in ", env={"X": "1"}, cwd="/tmp", user="root")
    assert (result.stdout, result.exit_code) == (b"in 1\n/tmp\n", 3)
    assert sandbox.run("sleep 1000", timeout_s=0.2).limit == "time"
    assert "32" in sandbox.run("ulimit -n", limits=CommandLimits(open_files=32)).text


def test_files_have_all_operations(sandbox: BlockingSandbox) -> None:
    files = sandbox.files
    files.mkdir("a")
    files.write("a/f", "one", mode=0o600)
    files.append("a/f", b" two")
    assert files.read("a/f") == b"one two" == b"".join(files.stream("a/f"))
    files.move("a/f", "g")
    assert ([entry.name for entry in files.list()], files.stat("g").size) == (["a", "g"], 7)
    files.remove("g")
    files.remove("a", recursive=True)
    assert files.list() == []


def test_a_stream_left_early_is_closed(sandbox: BlockingSandbox) -> None:
    sandbox.files.write("big", b"x" * (16 << 20))
    stream = sandbox.files.stream("big")
    assert next(stream)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    stream.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 5
    while sum(1 for _ in Path("/proc/self/fd").iterdir()) >= before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_shell_lasts(sandbox: BlockingSandbox) -> None:
    shell = sandbox.shell()
    shell.run("x=1; cd /tmp")
    assert shell.run("echo $x; pwd").stdout == b"1\n/tmp\n"
    shell.close()


def test_jobs_run_in_the_background(sandbox: BlockingSandbox) -> None:
    job = sandbox.background("echo started; sleep 1000")
    deadline = time.monotonic() + 10
    while job.log.read().data != b"started\n":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sandbox.kill(job)
    while job.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_its_life_is_steered(sandbox: BlockingSandbox) -> None:
    assert sandbox.alive()
    sandbox.pause()
    sandbox.resume()
    sandbox.kill_all()
    assert sandbox.run("echo on").stdout == b"on\n"
    sandbox.stop()
    sandbox.stop()
    assert not sandbox.alive()
    with pytest.raises(SandboxLost):
        sandbox.run("true")


def test_errors_come_through(sandbox: BlockingSandbox) -> None:
    with pytest.raises(NotFound):
        sandbox.files.read("nowhere")
    with pytest.raises(InvalidRequest):
        sandbox.run(["no-such-program"])


def test_several_threads_may_use_one(sandbox: BlockingSandbox) -> None:
    results: dict[int, bytes] = {}

    def work(number: int) -> None:
        sandbox.files.write(f"f{number}", str(number))
        results[number] = sandbox.run(["cat", f"f{number}"]).stdout

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {number: b"%d" % number for number in range(12)}


async def test_it_can_be_used_below_a_running_event_loop() -> None:
    with Sandbox.create() as sandbox:
        assert sandbox.run("echo fine").stdout == b"fine\n"


def test_leaving_with_an_exception_stops_it() -> None:
    with pytest.raises(ZeroDivisionError), Sandbox.create() as sandbox:
        raise ZeroDivisionError
    assert not sandbox.alive()


def test_an_interrupt_ends_the_call_and_the_command() -> None:
    text = (
        # Whoever runs the tests in the background may have told everybody to ignore interrupts.
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from skep.sandbox.sandbox import Sandbox\n"
        "with Sandbox.create() as sandbox:\n"
        "    try:\n        print('ready', flush=True); sandbox.run('exec sleep 1000')\n"
        "    except KeyboardInterrupt:\n"
        "        while sandbox.run('grep -lz ^sleep /proc/[0-9]*/cmdline').ok: pass\n"
        "        print('ended', flush=True)\n"
    )
    with started([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=30)[0] == "ended\n"
            assert process.returncode == 0
        finally:
            process.kill()
