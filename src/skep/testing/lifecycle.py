"""Promises about the life and death of a sandbox."""
# ruff: noqa: S108 - these are paths inside

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from skep.errors import SandboxLost
from skep.sandbox.sandbox import Sandbox, Size
from skep.testing.promise import MakeSandbox, eventually, output_of, promise, read_until, running

#: Every wait ends this soon after the sandbox's death.
SOON_S = 2.0
#: Longer than any machine takes, however much else it does.
SURE_S = 20.0


class LifePromises:
    """A sandbox is alive until it is stopped, and can be halted in between."""

    @promise
    async def test_it_is_alive_until_it_is_stopped(self, make_sandbox: MakeSandbox) -> None:
        sandbox = await make_sandbox()
        assert await sandbox.alive()
        await asyncio.gather(sandbox.stop(), sandbox.stop())
        await sandbox.stop()
        assert not await sandbox.alive()

    @promise
    async def test_leaving_it_stops_it(self, make_sandbox: MakeSandbox) -> None:
        with pytest.raises(ZeroDivisionError):
            async with await make_sandbox() as sandbox:
                raise ZeroDivisionError
        assert not await sandbox.alive()

    @promise
    async def test_a_paused_sandbox_does_nothing_until_it_is_resumed(self, sandbox: Sandbox) -> None:
        job = await sandbox.background("while :; do echo >> growing; done")
        await eventually(lambda: _longer(sandbox, 0))
        await sandbox.pause()
        size = (await sandbox.files.stat("growing")).size
        for _ in range(100):
            assert (await sandbox.files.stat("growing")).size == size
        await sandbox.resume()
        await eventually(lambda: _longer(sandbox, size))
        await job.kill()

    @promise
    async def test_pausing_and_resuming_may_be_repeated(self, sandbox: Sandbox) -> None:
        for call in (sandbox.pause, sandbox.pause, sandbox.resume, sandbox.resume):
            await call()
        assert (await sandbox.run("echo fine")).stdout == b"fine\n"

    @promise
    async def test_files_can_be_reached_in_a_paused_sandbox(self, sandbox: Sandbox) -> None:
        await sandbox.pause()
        await sandbox.files.write("file", b"1")
        assert await sandbox.files.read("file") == b"1"
        await sandbox.resume()

    @promise
    async def test_a_paused_sandbox_can_be_stopped(self, make_sandbox: MakeSandbox) -> None:
        sandbox = await make_sandbox()
        process = await sandbox.start("sleep 1000")
        await sandbox.pause()
        await sandbox.stop()
        with pytest.raises(SandboxLost):
            await process.wait()
        process.release()

    @promise
    async def test_a_paused_process_still_runs_out_of_time(self, sandbox: Sandbox) -> None:
        process = await sandbox.start("sleep 1000", timeout_s=0.3)
        await sandbox.pause()
        assert (await process.wait()).limit == "time"
        process.release()

    @promise
    async def test_killing_all_spares_nothing_but_the_sandbox(self, sandbox: Sandbox) -> None:
        await sandbox.files.write("kept", b"1")
        daemon = "setsid sh -c 'trap \"\" TERM HUP INT; echo $$ > daemon; while :; do sleep 0.01; done' & wait"
        process = await sandbox.start(daemon)
        await eventually(lambda: _has_text(sandbox, "daemon"))
        pid = int(await sandbox.files.read("daemon"))
        await sandbox.kill_all()
        assert (await process.wait()).signal == 9

        async def ended() -> bool:
            return not await running(sandbox, pid)

        await eventually(ended)
        assert await sandbox.alive()
        assert (await sandbox.run("cat kept")).stdout == b"1"
        process.release()

    @promise
    async def test_what_a_run_has_detached_ends_by_its_mark_and_nothing_else_does(self, sandbox: Sandbox) -> None:
        ours = [*await _detached(sandbox, "run:1"), *await _detached(sandbox, "run.2:1")]
        others = [pid for key in ("runs:1", "other:run:1", None) for pid in await _detached(sandbox, key)]
        assert await _left(sandbox, *ours, *others) == {*ours, *others}
        assert await sandbox.end_marked("run", within_s=SURE_S)

        async def gone() -> bool:
            return await _left(sandbox, *ours, *others) == set(others)

        await eventually(gone)

    @promise
    async def test_a_run_that_goes_on_starting_others_ends_by_its_mark(self, sandbox: Sandbox) -> None:
        others = await sandbox.background("echo $$; exec sleep 1000")
        restless = await sandbox.background(
            "while :; do setsid sleep 0.1 & sleep 0.02; echo; done", env={"SKEP_IDEMPOTENCY_KEY": "run:1"}
        )
        await anext(restless.attach())
        assert await sandbox.end_marked("run", within_s=SURE_S)
        assert (await restless.wait()).signal == 9
        assert others.running and await sandbox.alive()

    @promise
    async def test_sandboxes_know_nothing_of_each_other(self, make_sandbox: MakeSandbox) -> None:
        async with await make_sandbox() as one, await make_sandbox() as other:
            await one.run(
                "echo secret | tee file /tmp/file /cache/file /dev/shm/file; exec -a hidden-name sleep 1000 &"
            )
            assert one.id != other.id
            for path in ("/workspace/file", "/tmp/file", "/cache/file", "/dev/shm/file"):
                assert not (await other.run(["cat", path])).ok
            assert not (await other.run("grep -l hidden-nam[e] /proc/[0-9]*/cmdline")).ok
            await other.kill_all()
            assert (await one.run("grep -l hidden-nam[e] /proc/[0-9]*/cmdline")).ok

    @promise
    async def test_many_live_at_once(self, make_sandbox: MakeSandbox) -> None:
        async def live(number: int) -> bytes:
            async with await make_sandbox() as sandbox:
                await sandbox.files.write("file", str(number))
                return (await sandbox.run(["cat", "file"])).stdout

        assert await asyncio.gather(*(live(number) for number in range(16))) == [b"%d" % n for n in range(16)]

    @promise
    async def test_stopping_leaves_no_descriptor_open(self, make_sandbox: MakeSandbox) -> None:
        async def use() -> None:
            async with await make_sandbox() as sandbox:
                await sandbox.run("echo hi")
                await sandbox.files.write("f", b"1")
                job = await sandbox.background("sleep 1000")
                process = await sandbox.start("sleep 1000", stdin=True, terminal=Size())
                process.release()
                assert job.running

        async def settled() -> bool:
            return _open_descriptors() <= before + 5

        await use()
        before = _open_descriptors()
        for _ in range(6):
            await use()
        await eventually(settled)  # a mechanism may keep a few for its next sandbox, and none for each


Wait = Callable[[Sandbox], Awaitable[object]]


async def _blocked_write(sandbox: Sandbox) -> None:
    process = await sandbox.start("sleep 1000", stdin=True)
    try:
        await process.write(b"x" * (8 << 20))
        await process.wait()
    finally:
        process.release()


async def _terminal(sandbox: Sandbox) -> None:
    process = await sandbox.start("sleep 1000", terminal=Size())
    try:
        await output_of(process.stdout)
        await process.write(b"x\n" * 100_000)
        await process.wait()
    finally:
        process.release()


async def _stream(sandbox: Sandbox) -> None:
    process = await sandbox.start("echo started; exec sleep 1000")
    try:
        await read_until(process.stdout, b"started\n")
        assert await output_of(process.stdout) == b""
        await process.wait()
    finally:
        process.release()


async def _attached(sandbox: Sandbox) -> None:
    job = await sandbox.background("sleep 1000")
    async for _ in job.attach():
        pass
    await job.wait()


async def _watched(sandbox: Sandbox) -> None:
    async for _ in sandbox.files.watch():
        pass


async def _shell(sandbox: Sandbox) -> None:
    shell = await sandbox.shell()
    await asyncio.gather(shell.run("sleep 1000"), shell.run("sleep 1000"))


async def _busy_files(sandbox: Sandbox) -> None:
    while True:
        await sandbox.files.write("file", b"x" * 100_000)
        await sandbox.files.read("file")


async def _busy_commands(sandbox: Sandbox) -> None:
    while True:
        await sandbox.run("true")


async def _until_gone(sandbox: Sandbox) -> None:
    await sandbox.gone()
    await sandbox.run("true")


WAITS: dict[str, Wait] = {
    "run": lambda sandbox: sandbox.run("sleep 1000"),
    "run that ignores every signal": lambda sandbox: sandbox.run("trap '' TERM INT HUP; while :; do sleep 1; done"),
    "run with endless output": lambda sandbox: sandbox.run("yes", timeout_s=1000),
    "many runs": lambda sandbox: asyncio.gather(*(sandbox.run("sleep 1000") for _ in range(20))),
    "a stream": _stream,
    "a write": _blocked_write,
    "a terminal": _terminal,
    "a job": _attached,
    "a watch": _watched,
    "its end": _until_gone,
    "a shell": _shell,
    "files": _busy_files,
    "commands": _busy_commands,
}

CALLS: dict[str, Wait] = {
    "run": lambda sandbox: sandbox.run("true"),
    "start": lambda sandbox: sandbox.start("true"),
    "start on a terminal": lambda sandbox: sandbox.start("true", terminal=Size()),
    "background": lambda sandbox: sandbox.background("true"),
    "shell": lambda sandbox: sandbox.shell(),
    "pause": lambda sandbox: sandbox.pause(),
    "resume": lambda sandbox: sandbox.resume(),
    "kill_all": lambda sandbox: sandbox.kill_all(),
    "end_marked": lambda sandbox: sandbox.end_marked("run"),
    "read": lambda sandbox: sandbox.files.read("file"),
    "write": lambda sandbox: sandbox.files.write("file", b""),
    "append": lambda sandbox: sandbox.files.append("file", b""),
    "list": lambda sandbox: sandbox.files.list(),
    "stat": lambda sandbox: sandbox.files.stat("file"),
    "move": lambda sandbox: sandbox.files.move("file", "other"),
    "remove": lambda sandbox: sandbox.files.remove("file"),
    "mkdir": lambda sandbox: sandbox.files.mkdir("folder"),
    "stream": lambda sandbox: anext(sandbox.files.stream("file")),
    "watch": lambda sandbox: anext(sandbox.files.watch()),
}


class DeathPromises:
    """A sandbox that is lost is an exception, and nothing waits for what will not come."""

    async def destroy(self, sandbox: Sandbox) -> None:
        """End a sandbox as an accident would. A mechanism that can do worse than `stop` overrides this."""
        await sandbox.stop()

    @pytest.mark.parametrize("name", WAITS)
    @promise
    async def test_every_wait_ends_soon_after_its_death(self, make_sandbox: MakeSandbox, name: str) -> None:
        sandbox = await make_sandbox()
        await sandbox.files.write("file", b"1")
        waiting = asyncio.ensure_future(_waited(WAITS[name], sandbox))
        await _settled(sandbox, waiting)
        await self.destroy(sandbox)
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(waiting, SOON_S)
        await sandbox.stop()

    @promise
    async def test_it_is_known_to_be_dead_soon_after(self, make_sandbox: MakeSandbox) -> None:
        sandbox = await make_sandbox()
        await self.destroy(sandbox)

        async def dead() -> bool:
            return not await sandbox.alive()

        await eventually(dead, within_s=SOON_S)
        await sandbox.stop()

    @pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "destroyed"])
    @promise
    async def test_every_call_to_a_lost_sandbox_says_so(self, make_sandbox: MakeSandbox, stopped: bool) -> None:
        sandbox = await make_sandbox()
        await sandbox.files.write("file", b"1")
        process = await sandbox.start("sleep 1000", stdin=True)
        job = await sandbox.background("echo kept; sleep 1000")
        shell = await sandbox.shell()
        await (sandbox.stop() if stopped else self.destroy(sandbox))
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(process.wait(), SOON_S)
        late: dict[str, Wait] = {"a shell's run": lambda _: shell.run("true"), "a job's end": lambda _: job.wait()}
        for name, call in {**CALLS, **late}.items():
            with pytest.raises(SandboxLost):
                await asyncio.wait_for(call(sandbox), SOON_S)
                pytest.fail(f"{name} did as if nothing had happened")
        assert [kept.id for kept in sandbox.jobs()] == [job.id]
        await process.write(b"x")
        process.release()
        await sandbox.stop()


async def _waited(wait: Wait, sandbox: Sandbox) -> object:
    return await wait(sandbox)


async def _settled(sandbox: Sandbox, waiting: asyncio.Future[Any]) -> None:
    """Let a wait get as far as it can: commands go through in order, so these come after what it has started."""
    for _ in range(3):
        await sandbox.run("true")
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done(), waiting


async def _longer(sandbox: Sandbox, size: int) -> bool:
    listing = {entry.name: entry.size for entry in await sandbox.files.list()}
    return listing.get("growing", 0) > size


async def _has_text(sandbox: Sandbox, path: str) -> bool:
    return (await sandbox.run(["test", "-s", path])).ok


def _open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def _detached(sandbox: Sandbox, key: str | None) -> list[int]:
    """Leave two processes behind: one in the group of its command, and one that has left it."""
    left = "nohup sleep 1000 >/dev/null 2>&1 & echo $!; setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    done = await sandbox.run(left, env=None if key is None else {"SKEP_IDEMPOTENCY_KEY": key})
    return [int(pid) for pid in done.text.split()]


async def _left(sandbox: Sandbox, *pids: int) -> set[int]:
    """Say which of these run inside."""
    look = "for pid; do read -r _ _ state _ < /proc/$pid/stat && [ $state != Z ] && echo $pid; done 2>/dev/null"
    done = await sandbox.run(["/bin/sh", "-c", look, "look", *map(str, pids)])
    return {int(pid) for pid in done.text.split()}
