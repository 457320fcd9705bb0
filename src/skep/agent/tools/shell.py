"""Commands: in a shell that lasts, in the background, and tests."""

from __future__ import annotations

import asyncio
import re
import shlex
from contextlib import suppress
from dataclasses import asdict

from skep.agent.actions import PollCommand, RunCommand, RunTests, StopCommand
from skep.agent.bounds import keep
from skep.agent.desk import Desk
from skep.agent.observations import CommandEnded, CommandPolled, CommandStarted, Observation, TestsRan
from skep.agent.tool import Tool
from skep.agent.tools.paths import HOME, within
from skep.agent.tools.printed import printed
from skep.agent.tools.shortfall import failed_by_itself
from skep.sandbox.sandbox import Job
from skep.sessions.computer import Computer

#: How long the last words of a command that has ended are waited for, and the end of one that was killed.
_LAST_WORDS_S = 0.5
_END_S = 5.0
_PYTEST = "python3 -m pytest -q"
_COUNTS = re.compile(r"(\d{1,9}) (passed|failed|error|errors|skipped)\b")
_UNITTEST = re.compile(r"^Ran (\d{1,9}) tests? in ", re.MULTILINE)
_UNITTEST_COUNTS = re.compile(r"(failures|errors|skipped)=(\d{1,9})")


async def run_command(action: RunCommand, desk: Desk) -> Observation:
    computer = await desk.computer()
    if action.background:
        job = await computer.background(action.command, env={"SKEP_IDEMPOTENCY_KEY": action.stamp.key})
        desk.jobs.append(job.id)
        return CommandStarted(stamp=action.stamp, job=job.id)
    room = await computer.shell(desk.room)
    usual_s = desk.timeout_s(action.kind) if action.timeout_s is None else None
    done = await room.run(action.command, key=action.stamp.key, timeout_s=usual_s or action.timeout_s)
    told = await printed(computer, action, done)
    if (failed := failed_by_itself(action, done, told, timeout_s=usual_s)) is not None:
        return failed
    limit = done.exit.limit
    note = "the shell is a new one: the folder and variables of the last are gone" if room.replaced else ""
    return CommandEnded(
        stamp=action.stamp, exit_code=done.exit_code, timed_out=limit == "time", limit=limit, note=note, **told
    )


async def poll_command(action: PollCommand, desk: Desk) -> Observation:
    computer = await desk.computer()
    async with computer.sandbox("exec") as sandbox:
        job = sandbox.job(action.job)
        if job.running and action.wait_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(action.wait_s):
                    await job.wait()
        return await _polled(action, job, desk)


async def stop_command(action: StopCommand, desk: Desk) -> Observation:
    computer = await desk.computer()
    async with computer.sandbox("exec") as sandbox:
        job = sandbox.job(action.job)
        if job.running:
            await job.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await job.wait()
        return await _polled(action, job, desk)


async def run_tests(action: RunTests, desk: Desk) -> Observation:
    computer = await desk.computer()
    root = await _root(computer) if action.paths else HOME
    paths = shlex.join(root + within(path).removeprefix(HOME) for path in action.paths)
    command = f"{action.command or _PYTEST} {paths}"
    room = await computer.shell(desk.room)
    usual_s = desk.timeout_s(action.kind) if action.timeout_s is None else None
    done = await room.run(command, key=action.stamp.key, timeout_s=usual_s or action.timeout_s)
    told = await printed(computer, action, done)
    if (failed := failed_by_itself(action, done, told, timeout_s=usual_s)) is not None:
        return failed
    return TestsRan(stamp=action.stamp, exit_code=done.exit_code, **counts(done.text, done.error_text), **told)


async def _root(computer: Computer) -> str:
    """Return the workspace's path as commands see it: without isolation it is a folder of the machine."""
    async with computer.sandbox("exec") as sandbox:
        return HOME if sandbox.mechanism != "local" else (await sandbox.run("pwd")).text.strip()


def counts(stdout: str, stderr: str) -> dict[str, int]:
    """Read how many tests ended how from what pytest or unittest say last."""
    summary = stdout.strip().rsplit("\n", 1)[-1]
    if found := _COUNTS.findall(summary):
        return {"errors" if name == "error" else name: int(count) for count, name in found}
    if (ran := _UNITTEST.search(stderr)) is None:
        return {}
    bad = {name: int(count) for name, count in _UNITTEST_COUNTS.findall(stderr[ran.end() :])}
    failed, errors, skipped = (bad.get(name, 0) for name in ("failures", "errors", "skipped"))
    return {"passed": int(ran[1]) - failed - errors - skipped, "failed": failed, "errors": errors, "skipped": skipped}


async def _polled(action: PollCommand | StopCommand, job: Job, desk: Desk) -> CommandPolled:
    if not job.running:
        with suppress(TimeoutError):  # a process that it left behind may hold its output open
            async with asyncio.timeout(_LAST_WORDS_S):
                async for _ in job.attach(job.log.read().cursor):
                    pass
    heard = job.log.read(desk.cursors.get(job.id, 0))
    desk.cursors[job.id] = heard.cursor
    kept = await keep(await desk.computer(), action.stamp.call, heard.data.decode(errors="replace"))
    ended = job.process.exit
    return CommandPolled(
        stamp=action.stamp,
        job=job.id,
        running=ended is None,
        exit_code=None if ended is None else ended.status,
        missed=heard.missed,
        **asdict(kept),
    )


TOOLS = (
    Tool(RunCommand, run_command, network=True),
    Tool(PollCommand, poll_command, repeatable=True),
    Tool(StopCommand, stop_command, repeatable=True),
    Tool(RunTests, run_tests, network=True, repeatable=lambda action, _: not action.command),
)
