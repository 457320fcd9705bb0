"""Promises about processes on a terminal."""

from __future__ import annotations

import signal

import pytest

from skep.errors import InvalidRequest
from skep.sandbox.sandbox import Process, Sandbox, Size
from skep.testing.promise import eventually, output_of, promise, read_until

QUIET = "stty -echo; echo ready; "


class TerminalPromises:
    """A process may have a terminal, which behaves as a local one."""

    @promise
    async def test_all_three_streams_are_one_terminal_of_the_size_asked_for(self, sandbox: Sandbox) -> None:
        command = "test -t 0 && test -t 1 && test -t 2 && stty size && echo $TERM && echo err >&2"
        process = await sandbox.start(command, terminal=Size(33, 101))
        shown = await output_of(process.stdout)
        assert shown == b"33 101\r\nxterm-256color\r\nerr\r\n"
        assert await output_of(process.stderr) == b""
        assert (await process.wait()).code == 0
        process.release()

    @promise
    async def test_a_new_size_is_told_to_the_program(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(
            "trap 'stty size' WINCH; echo ready; while :; do sleep 0.01; done", terminal=Size()
        )
        await read_until(process.stdout, b"ready\r\n")
        await process.resize(Size(50, 132))
        await read_until(process.stdout, b"50 132\r\n")
        await _end(process)

    @promise
    async def test_what_is_typed_is_echoed_and_read(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("read -r line; echo read: $line", terminal=Size())
        await process.write(b"hello\n")
        assert await output_of(process.stdout) == b"hello\r\nread: hello\r\n"
        process.release()

    @promise
    async def test_control_c_interrupts_what_runs_in_front(self, sandbox: Sandbox) -> None:
        process = await _started(sandbox, "sleep 1000; echo not reached")
        await process.write(b"\x03")
        assert (await process.wait()).status == 128 + signal.SIGINT
        assert b"not reached" not in await output_of(process.stdout)
        process.release()

    @promise
    async def test_the_end_of_input_is_typed(self, sandbox: Sandbox) -> None:
        process = await _started(sandbox, "cat; echo end")
        await process.write(b"one\n")
        await read_until(process.stdout, b"one\r\n")
        await process.close_stdin()
        assert await output_of(process.stdout) == b"end\r\n"
        assert (await process.wait()).code == 0
        process.release()

    @promise
    async def test_an_interactive_shell_has_job_control(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["bash", "--norc", "-i"], terminal=Size(), env={"PS1": "$ "})
        await read_until(process.stdout, b"$ ")
        await process.write(b"bash -c 'echo in front; exec sleep 1000'\n")
        await read_until(process.stdout, b"\rin front\r\n")
        await process.write(b"\x1a")
        await read_until(process.stdout, b"Stopped")
        await process.write(b"exit\nexit 6\n")  # the first is answered with: there are stopped jobs
        await output_of(process.stdout)
        assert (await process.wait()).code == 6
        process.release()

    @promise
    async def test_everything_shown_before_the_end_arrives(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("seq 20000", terminal=Size())
        shown = await output_of(process.stdout)
        assert shown.split() == [b"%d" % number for number in range(1, 20001)]
        process.release()

    @promise
    async def test_the_terminal_going_away_ends_its_programs(self, sandbox: Sandbox) -> None:
        process = await _started(sandbox, "exec sleep 1000")
        process.release()
        assert (await process.wait()).signal == signal.SIGHUP

    @promise
    async def test_typing_at_a_program_that_does_not_read_or_is_gone_can_be_given_up(self, sandbox: Sandbox) -> None:
        process = await _started(sandbox, "exec true")
        await process.wait()
        await process.write(b"x\n" * 100_000)
        process.release()

    @promise
    async def test_without_a_terminal_there_is_nothing_to_resize(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["true"], stdin=True)
        with pytest.raises(InvalidRequest):
            await process.resize(Size())
        await process.wait()
        process.release()

    @promise
    async def test_the_erase_key_takes_back_a_whole_character(self, sandbox: Sandbox) -> None:
        process = await _started(sandbox, "read -r line; printf '%s' \"$line\" | od -An -tx1")
        await process.write("aż\x7fb\n".encode())
        assert (await output_of(process.stdout)).split() == [b"61", b"62"]
        process.release()

    @promise
    async def test_a_terminal_that_is_gone_has_no_size_to_change(self, sandbox: Sandbox) -> None:
        process = await _started(sandbox, "exec true")
        await process.wait()
        await process.resize(Size(10, 10))
        process.release()
        await process.resize(Size(10, 10))

    @pytest.mark.parametrize("size", [(-1, 80), (24, 65536), (1 << 40, 80)])
    @promise
    async def test_a_size_that_no_terminal_has_is_the_callers_mistake(
        self, sandbox: Sandbox, size: tuple[int, int]
    ) -> None:
        with pytest.raises(InvalidRequest):
            await sandbox.start(["true"], terminal=Size(*size))

    @promise
    async def test_a_terminal_belongs_to_one_process_and_its_own(self, sandbox: Sandbox) -> None:
        first = await _started(sandbox, "tty; read -r x; echo got $x")
        second = await _started(sandbox, "tty; read -r x; echo got $x")
        await second.write(b"two\n")
        assert b"got two" in await output_of(second.stdout)
        await first.write(b"one\n")
        assert b"got one" in await output_of(first.stdout)
        for process in (first, second):
            process.release()

    @promise
    async def test_a_daemon_that_keeps_the_terminal_does_not_keep_the_result(self, sandbox: Sandbox) -> None:
        process = await _started(sandbox, "trap '' HUP; sleep 1000 & exit 4")
        assert (await process.wait()).code == 4
        process.release()
        await sandbox.kill_all()

        async def nobody() -> bool:
            return not (await sandbox.run("grep -lz '^sleep' /proc/[0-9]*/cmdline")).ok

        await eventually(nobody)


async def _started(sandbox: Sandbox, command: str) -> Process:
    process = await sandbox.start(QUIET + command, terminal=Size())
    await read_until(process.stdout, b"ready\r\n")
    return process


async def _end(process: Process) -> None:
    await process.kill()
    await process.wait()
    process.release()
