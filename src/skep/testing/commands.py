"""Promises about running commands."""
# ruff: noqa: S108 - these are paths inside

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from skep.errors import InvalidRequest, LimitReached
from skep.sandbox.limits import CommandLimits, Limits
from skep.sandbox.sandbox import Sandbox
from skep.testing.promise import MakeSandbox, eventually, output_of, promise, read_until, running

MIB = 1 << 20


class RunPromises:
    """A command is run to its end and what it did is a value."""

    @promise
    async def test_returns_what_a_command_printed_and_how_it_ended(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("echo out; echo err >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 3)
        assert not result.ok and result.limit is None and not result.truncated
        assert result.duration_s > 0

    @pytest.mark.parametrize("code", [0, 1, 2, 42, 126, 127, 255])
    @promise
    async def test_an_exit_code_is_passed_on_unchanged(self, sandbox: Sandbox, code: int) -> None:
        result = await sandbox.run(["/bin/sh", "-c", f"exit {code}"])
        assert (result.exit.code, result.exit.signal, result.exit_code) == (code, None, code)
        assert result.ok == (code == 0)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGHUP])
    @promise
    async def test_a_command_ended_by_a_signal_says_which(self, sandbox: Sandbox, number: int) -> None:
        result = await sandbox.run(f"kill -{int(number)} $$")
        assert (result.exit.code, result.exit.signal, result.exit_code) == (None, number, 128 + number)
        assert result.limit is None

    @promise
    async def test_a_list_is_run_as_it_is_and_a_text_by_the_shell(self, sandbox: Sandbox) -> None:
        assert (await sandbox.run(["echo", "$HOME; *"])).stdout == b"$HOME; *\n"
        assert (await sandbox.run("echo $HOME; echo $((6 * 7))")).stdout == b"/workspace\n42\n"

    @promise
    async def test_text_beyond_ascii_goes_both_ways(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("printf '%s' 'żółć 蜂の巣 🐝'")
        assert result.text == "żółć 蜂の巣 🐝"

    @promise
    async def test_bytes_that_are_no_text_come_back_as_they_were(self, sandbox: Sandbox) -> None:
        every = bytes(range(256)) * 16
        result = await sandbox.run(["cat"], input=every)
        assert result.stdout == every
        assert "\N{REPLACEMENT CHARACTER}" in result.text

    @promise
    async def test_without_input_a_command_reads_the_end_of_file(self, sandbox: Sandbox) -> None:
        assert (await sandbox.run("cat; read -r line; echo $?")).stdout == b"1\n"

    @promise
    async def test_more_input_than_a_pipe_holds_arrives_whole(self, sandbox: Sandbox) -> None:
        data = os.urandom(1024) * (8 << 10)
        result = await sandbox.run(["cat"], input=data)
        assert result.stdout == data

    @promise
    async def test_input_that_nobody_reads_holds_nothing_up(self, sandbox: Sandbox) -> None:
        assert (await sandbox.run(["true"], input=b"x" * 8 * MIB)).ok
        assert (await sandbox.run("exec <&-; echo done", input=b"x" * 8 * MIB)).stdout == b"done\n"

    @promise
    async def test_much_output_on_both_streams_at_once_arrives_whole(self, sandbox: Sandbox) -> None:
        result = await sandbox.run(f"head -c {5 * MIB} /dev/zero & head -c {5 * MIB} /dev/zero >&2; wait")
        assert (len(result.stdout), len(result.stderr)) == (5 * MIB, 5 * MIB)

    @promise
    async def test_output_written_right_before_the_end_is_never_lost(self, sandbox: Sandbox) -> None:
        results = await asyncio.gather(*(sandbox.run(f"head -c 70000 /dev/zero; printf {n}") for n in range(20)))
        assert [result.stdout[70000:] for result in results] == [str(n).encode() for n in range(20)]

    @promise
    async def test_output_past_the_limit_is_cut_and_said(self, make_sandbox: MakeSandbox) -> None:
        async with await make_sandbox(limits=Limits(output_bytes=1000)) as sandbox:
            result = await sandbox.run("head -c 100000 /dev/zero; echo oops >&2")
            assert (len(result.stdout), result.stderr, result.truncated) == (1000, b"oops\n", True)
            assert (result.limit, result.ok) == ("output", True)
            whole = await sandbox.run("head -c 1000 /dev/zero")
            assert (len(whole.stdout), whole.truncated, whole.limit) == (1000, False, None)

    @promise
    async def test_a_command_works_in_the_workspace_unless_told_otherwise(self, sandbox: Sandbox) -> None:
        await sandbox.files.mkdir("below/here")
        for cwd, place in ((None, "/workspace"), ("below/here", "/workspace/below/here"), ("/tmp", "/tmp")):
            assert (await sandbox.run(["pwd"], cwd=cwd)).text.strip() == place

    @promise
    async def test_the_environment_is_clean_and_its_own(
        self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SKEP_TEST_SECRET", "of the controller")
        result = await sandbox.run("env", env={"MINE": "a=b c\nd"})
        assert "SKEP_TEST_SECRET" not in result.text
        assert "MINE=a=b c\nd\n" in result.text
        assert "HOME=/workspace\n" in result.text and "USER=agent\n" in result.text
        assert "MINE" not in (await sandbox.run("env")).text

    @pytest.mark.parametrize(
        "command",
        [["no-such-program"], ["/workspace/no/such"], ["/etc"], ["/etc/passwd"], [], [""], "", ["a\0b"], "echo \ud800"],
        ids=repr,
    )
    @promise
    async def test_a_command_that_cannot_start_is_the_callers_mistake(
        self, sandbox: Sandbox, command: str | list[str]
    ) -> None:
        if command == "":
            assert (await sandbox.run(command)).ok  # for a shell that is nothing to do
            return
        with pytest.raises(InvalidRequest) as refused:
            await sandbox.run(command)
        assert refused.value.hint

    @pytest.mark.parametrize("cwd", ["nowhere", "/etc/passwd", "a\0b"])
    @promise
    async def test_a_folder_that_cannot_be_entered_is_the_callers_mistake(self, sandbox: Sandbox, cwd: str) -> None:
        with pytest.raises(InvalidRequest):
            await sandbox.run(["true"], cwd=cwd)

    @pytest.mark.parametrize("name", ["", "A=B", "A\0", "\ud800"])
    @promise
    async def test_a_name_that_no_variable_can_have_is_the_callers_mistake(self, sandbox: Sandbox, name: str) -> None:
        with pytest.raises(InvalidRequest):
            await sandbox.run(["true"], env={name: "x"})

    @promise
    async def test_a_command_that_is_too_long_is_refused_with_a_way_out(self, sandbox: Sandbox) -> None:
        with pytest.raises(InvalidRequest, match="too long") as refused:
            await sandbox.run(["true", *("x" * 100_000 for _ in range(64))])
        assert "file" in (refused.value.hint or "")
        assert (await sandbox.run("true")).ok

    @promise
    async def test_what_a_command_leaves_in_the_background_is_not_waited_for(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("sleep 1000 & echo $!")
        assert await running(sandbox, int(result.text))

    @promise
    async def test_many_commands_at_once_keep_their_results_apart(self, sandbox: Sandbox) -> None:
        async def ask(number: int) -> bool:
            result = await sandbox.run(f"read -r x; echo $x; echo {number} >&2; exit {number}", input=b"%d\n" % number)
            return (result.text, result.error_text, result.exit_code) == (f"{number}\n", f"{number}\n", number)

        assert all(await asyncio.gather(*(ask(number) for number in range(40))))

    @promise
    async def test_a_cancelled_call_ends_its_command(self, sandbox: Sandbox) -> None:
        call = asyncio.ensure_future(sandbox.run("echo $$ > pid; exec sleep 1000"))
        await eventually(lambda: _has_text(sandbox, "pid"))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        pid = int(await sandbox.files.read("pid"))
        await eventually(lambda: _ended(sandbox, pid))

    @promise
    async def test_a_call_cancelled_at_any_moment_leaves_nothing_running(self, sandbox: Sandbox) -> None:
        for steps in range(12):
            call = asyncio.ensure_future(sandbox.run(["sleep", "31415"]))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await eventually(lambda: _nobody_sleeps(sandbox))


class TimePromises:
    """A command has so much time and no more."""

    @promise
    async def test_a_command_whose_time_is_up_is_ended_and_said(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("echo early; exec sleep 1000", timeout_s=0.3)
        assert (result.limit, result.stdout, result.ok) == ("time", b"early\n", False)

    @promise
    async def test_the_time_is_the_sandboxs_own_unless_one_is_given(self, make_sandbox: MakeSandbox) -> None:
        async with await make_sandbox(limits=Limits(command_s=0.3)) as sandbox:
            assert (await sandbox.run("sleep 1000")).limit == "time"
            assert (await sandbox.run("sleep 0.5", timeout_s=30)).limit is None

    @promise
    async def test_a_command_may_tidy_up_when_its_time_is_up(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("trap 'echo tidy; exit 0' TERM; while :; do sleep 0.01; done", timeout_s=0.3)
        assert (result.limit, result.stdout) == ("time", b"tidy\n")

    @promise
    async def test_a_command_that_will_not_hear_is_ended_all_the_same(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("trap '' TERM INT HUP; while :; do sleep 0.01; done", timeout_s=0.2)
        assert (result.limit, result.exit.signal) == ("time", signal.SIGKILL)

    @promise
    async def test_no_command_gets_more_time_than_the_cap(self, make_sandbox: MakeSandbox) -> None:
        async with await make_sandbox(limits=Limits(command_cap_s=0.3)) as sandbox:
            assert (await sandbox.run("sleep 60", timeout_s=50)).limit == "time"

    @promise
    async def test_what_a_command_started_ends_with_its_time(self, sandbox: Sandbox) -> None:
        deaf = "(trap '' TERM; echo $BASHPID > pid; while :; do sleep 0.01; done) & wait"
        assert (await sandbox.run(deaf, timeout_s=0.5)).limit == "time"
        pid = int(await sandbox.files.read("pid"))
        await eventually(lambda: _ended(sandbox, pid))

    @promise
    async def test_endless_output_does_not_outlast_its_time(self, make_sandbox: MakeSandbox) -> None:
        async with await make_sandbox(limits=Limits(output_bytes=MIB)) as sandbox:
            result = await sandbox.run("yes & yes >&2; wait", timeout_s=0.5)
            assert result.limit == "time" and result.truncated
            assert len(result.stdout) == len(result.stderr) == MIB

    @promise
    async def test_a_started_process_has_its_time_too(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sleep", "1000"], timeout_s=0.2)
        assert (await process.wait()).limit == "time"
        process.release()


class CommandLimitPromises:
    """One command may be held shorter than its sandbox."""

    @promise
    async def test_processor_time(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("while :; do :; done", limits=CommandLimits(cpu_s=1))
        assert (result.limit, result.ok) == ("cpu", False)

    @promise
    async def test_processor_time_of_a_command_that_ignores_the_warning(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("trap '' XCPU; while :; do :; done", limits=CommandLimits(cpu_s=1))
        assert (result.limit, result.exit.signal) == ("cpu", signal.SIGKILL)

    @promise
    async def test_size_of_a_file(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("head -c 9999999 /dev/zero > big; exit $?", limits=CommandLimits(file_bytes=MIB))
        assert (result.limit, (await sandbox.files.stat("big")).size) == ("disk", MIB)

    @promise
    async def test_open_files(self, sandbox: Sandbox) -> None:
        many = "for i in $(seq 100); do exec {fd}</dev/null || exit 9; done"
        assert (await sandbox.run(many)).ok
        result = await sandbox.run(many, limits=CommandLimits(open_files=32))
        assert not result.ok and "Too many open files" in result.error_text

    @promise
    async def test_memory(self, sandbox: Sandbox) -> None:
        hungry = "x=$(head -c 100000000 /dev/zero | tr '\\0' x); echo ${#x}"
        result = await sandbox.run(hungry, limits=CommandLimits(memory_bytes=64 * MIB))
        assert not result.ok and b"100000000" not in result.stdout

    @promise
    async def test_a_limit_holds_for_its_command_alone(self, sandbox: Sandbox) -> None:
        await sandbox.run("true", limits=CommandLimits(open_files=32, file_bytes=1))
        result = await sandbox.run("ulimit -n; echo hello > file")
        assert result.ok and int(result.text) > 32


class StreamPromises:
    """A started process is talked to while it runs."""

    @promise
    async def test_output_and_input_alternate(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("while read -r x; do echo got $x; echo log $x >&2; done; echo end", stdin=True)
        for word in (b"one", b"two"):
            await process.write(word + b"\n")
            assert await read_until(process.stdout, b"\n") == b"got " + word + b"\n"
            assert await read_until(process.stderr, b"\n") == b"log " + word + b"\n"
        await process.close_stdin()
        assert await output_of(process.stdout) == b"end\n"
        assert (await process.wait()).code == 0
        process.release()

    @promise
    async def test_the_end_of_input_is_seen(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["cat"], stdin=True)
        await process.write(b"all")
        await process.close_stdin()
        await process.close_stdin()
        assert await output_of(process.stdout) == b"all"
        assert (await process.wait()).code == 0
        process.release()

    @promise
    async def test_nothing_is_read_before_it_is_asked_for(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("head -c 20000000 /dev/zero; echo done > done")
        assert await process.stdout.read()
        # What is not asked for stays with the program, which waits.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.wait(), 0.2)
        await output_of(process.stdout)
        assert (await process.wait()).code == 0
        process.release()

    @promise
    async def test_an_endless_stream_takes_no_more_memory(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["cat", "/dev/zero"])
        before, seen = _resident_bytes(), 0
        while seen < 150 * MIB:
            seen += len(await process.stdout.read())
        assert _resident_bytes() - before < 32 * MIB
        await process.kill()
        assert (await process.wait()).signal == signal.SIGKILL
        process.release()

    @promise
    async def test_a_channel_is_a_socket_for_both_directions(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("read -r x; echo answer to $x >&0; echo out", channel=True)
        assert process.channel is not None
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(process.channel, b"question\n")
        assert await loop.sock_recv(process.channel, 100) == b"answer to question\n"
        assert await output_of(process.stdout) == b"out\n"
        assert await loop.sock_recv(process.channel, 100) == b""
        process.release()

    @promise
    async def test_two_writers_at_once_both_get_through(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("cat > both; wc -c < both", stdin=True)
        await asyncio.gather(process.write(b"a" * 3 * MIB), process.write(b"b" * 3 * MIB))
        await process.close_stdin()
        assert int(await output_of(process.stdout)) == 6 * MIB
        process.release()

    @promise
    async def test_writing_to_a_process_that_has_ended_is_no_error(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["true"], stdin=True)
        await process.wait()
        await process.write(b"x" * MIB)
        await process.close_stdin()
        await process.signal(signal.SIGTERM)
        await process.kill()
        process.release()
        process.release()

    @promise
    async def test_input_that_was_not_asked_for_is_refused(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["true"])
        with pytest.raises(InvalidRequest):
            await process.write(b"x")
        await process.wait()
        process.release()

    @promise
    async def test_waiting_twice_or_late_gives_the_same_answer(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("exit 7")
        first, second = await asyncio.gather(process.wait(), process.wait())
        assert first == second == await process.wait() == process.exit
        assert first.code == 7
        process.release()

    @promise
    async def test_its_number_is_the_one_seen_inside_and_it_leads_its_group(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("read -r pid _ _ _ group _ < /proc/self/stat; echo $$ $group")
        assert await output_of(process.stdout) == b"%d %d\n" % (process.pid, process.pid)
        process.release()

    @promise
    async def test_a_stream_ends_when_its_process_closes_it(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("exec >&-; read -r x; echo $x >&2", stdin=True)
        assert await output_of(process.stdout) == b""
        await process.write(b"still here\n")
        assert await output_of(process.stderr) == b"still here\n"
        process.release()


class SignalPromises:
    """Signals reach a process and its group."""

    @promise
    async def test_a_signal_is_delivered(self, sandbox: Sandbox) -> None:
        loop = "trap 'echo usr1' USR1; trap 'exit 5' USR2; echo ready; while :; do sleep 0.01; done"
        process = await sandbox.start(loop)
        await read_until(process.stdout, b"ready\n")
        await process.signal(signal.SIGUSR1, group=False)
        await read_until(process.stdout, b"usr1\n")
        await process.signal(signal.SIGUSR2, group=False)
        assert (await process.wait()).code == 5
        process.release()

    @promise
    async def test_an_interrupt_ends_a_command(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("echo ready; exec sleep 1000")
        await read_until(process.stdout, b"ready\n")
        await process.signal(signal.SIGINT)
        assert (await process.wait()).signal == signal.SIGINT
        process.release()

    @promise
    async def test_a_group_goes_as_a_whole(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("sleep 1000 & echo $!; (sleep 1000 & echo $!); wait")
        pids = [int(pid) for pid in (await _lines(process.stdout, 2))]
        await process.kill()
        assert (await process.wait()).signal == signal.SIGKILL
        for pid in pids:
            await eventually(lambda pid=pid: _ended(sandbox, pid))  # type: ignore[misc]
        process.release()

    @promise
    async def test_a_signal_to_the_process_alone_spares_its_children(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("sleep 1000 & echo $!; wait")
        (pid,) = await _lines(process.stdout, 1)
        await process.signal(signal.SIGTERM, group=False)
        assert (await process.wait()).signal == signal.SIGTERM
        assert await running(sandbox, int(pid))
        process.release()

    @promise
    async def test_a_process_that_is_halted_from_inside_can_be_ended(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("echo ready; kill -STOP $$")
        await read_until(process.stdout, b"ready\n")
        await process.kill()
        assert (await process.wait()).signal == signal.SIGKILL
        process.release()

    @promise
    async def test_commands_start_while_a_program_halts_all_it_sees(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("echo ready; while :; do kill -STOP -1; done")
        await read_until(process.stdout, b"ready\n")
        try:
            started = await sandbox.start(["true"])
            started.release()
        except LimitReached:
            pass  # it never got anywhere, and that is said
        await sandbox.kill_all()
        assert (await process.wait()).signal == signal.SIGKILL
        process.release()
        assert (await sandbox.run("echo fine")).stdout == b"fine\n"


class UserPromises:
    """Commands run as `agent`, or as a root that only looks like one."""

    @promise
    async def test_the_agent_is_an_ordinary_user_with_a_home(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("id -un; id -u; echo ~; touch ~/mine && echo writable")
        name, uid, home, writable = result.text.split()
        assert (name, home, writable) == ("agent", "/workspace", "writable") and int(uid) > 0

    @promise
    async def test_root_looks_like_root(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("id -u; id -un; whoami; touch f && chown root:root f && echo owned", user="root")
        assert result.text.split() == ["0", "root", "root", "owned"]

    @promise
    async def test_root_has_no_privilege(self, sandbox: Sandbox) -> None:
        result = await sandbox.run("grep CapEff /proc/self/status; mount -t tmpfs x /tmp", user="root")
        assert int(result.text.split()[1], 16) == 0
        assert not result.ok

    @promise
    async def test_both_users_share_their_files(self, sandbox: Sandbox) -> None:
        await sandbox.run("echo made by root > shared", user="root")
        assert (await sandbox.run("cat shared && rm shared")).stdout == b"made by root\n"


async def _lines(stream: object, count: int) -> list[bytes]:
    seen = b""
    while seen.count(b"\n") < count:
        seen += await read_until(stream, b"\n")
    return seen.split()


async def _ended(sandbox: Sandbox, pid: int) -> bool:
    return not await running(sandbox, pid)


async def _has_text(sandbox: Sandbox, path: str) -> bool:
    return (await sandbox.run(["test", "-s", path])).ok


async def _nobody_sleeps(sandbox: Sandbox) -> bool:
    return not (await sandbox.run("grep -lz 3141[5] /proc/[0-9]*/cmdline")).ok


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
