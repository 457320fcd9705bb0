"""Promises about background jobs."""
# ruff: noqa: S108 - these are paths inside

from __future__ import annotations

import asyncio
import signal

import pytest

from skep.errors import InvalidRequest, NotFound
from skep.sandbox.sandbox import Job, Sandbox
from skep.testing.promise import eventually, promise, running


class JobPromises:
    """A job goes on by itself; its output is kept, bounded, for whoever asks."""

    @promise
    async def test_a_job_runs_while_other_commands_do(self, sandbox: Sandbox) -> None:
        job = await sandbox.background("echo $$; exec sleep 1000")
        pid = int(await _logged(job, b"\n"))
        assert job.running and (await sandbox.run("echo meanwhile")).ok
        assert await running(sandbox, pid)

    @promise
    async def test_jobs_are_listed_oldest_first_and_found_by_their_id(self, sandbox: Sandbox) -> None:
        jobs = [await sandbox.background(command) for command in ("sleep 1000", "true", "sleep 1000")]
        await jobs[1].wait()
        assert sandbox.jobs() == jobs
        assert [job.running for job in jobs] == [True, False, True]
        assert sandbox.job(jobs[1].id) is jobs[1]
        assert len({job.id for job in jobs}) == 3
        with pytest.raises(NotFound):
            sandbox.job("no such job")

    @promise
    async def test_the_end_of_a_job_is_kept(self, sandbox: Sandbox) -> None:
        job = await sandbox.background("echo last words >&2; exit 9")
        assert (await job.wait()).code == 9
        assert await _attached(job) == b"last words\n"
        assert sandbox.job(job.id).process.exit == await job.wait()

    @promise
    async def test_a_log_is_read_on_from_a_cursor(self, sandbox: Sandbox) -> None:
        job = await sandbox.background("echo one; until [ -e go ]; do sleep 0.01; done; echo two")
        await _logged(job, b"one\n")
        first = job.log.read()
        assert (first.data, first.missed) == (b"one\n", 0)
        assert job.log.read(first.cursor).data == b""
        await sandbox.files.write("go", b"")
        await job.wait()
        await eventually(lambda: _grown(job, first.cursor))
        assert job.log.read(first.cursor).data == b"two\n"
        assert job.log.read().data == b"one\ntwo\n"

    @promise
    async def test_whoever_attaches_gets_what_was_and_what_comes_to_the_end(self, sandbox: Sandbox) -> None:
        job = await sandbox.background("echo one; until [ -e go ]; do sleep 0.01; done; echo two >&2; echo three")
        await _logged(job, b"one\n")
        both = [asyncio.ensure_future(_attached(job)), asyncio.ensure_future(_attached(job, 4))]
        await sandbox.files.write("go", b"")
        whole, rest = await asyncio.gather(*both)
        assert whole.startswith(b"one\n") and sorted(whole.split()) == [b"one", b"three", b"two"]
        assert rest == whole[4:]
        assert await _attached(job) == whole

    @promise
    async def test_killing_a_job_reaches_its_group(self, sandbox: Sandbox) -> None:
        job = await sandbox.background("sleep 1000 & echo $!; wait")
        child = int(await _logged(job, b"\n"))
        await job.kill()
        assert (await job.wait()).signal == signal.SIGKILL
        assert not job.running

        async def gone() -> bool:
            return not await running(sandbox, child)

        await eventually(gone)
        await job.kill()

    @promise
    async def test_a_noisy_job_is_never_held_up_and_its_log_stays_small(self, sandbox: Sandbox) -> None:
        job = await sandbox.background("head -c 20000000 /dev/zero; printf end")
        assert (await job.wait()).code == 0
        await eventually(lambda: _grown(job, 20_000_002))
        kept = job.log.read()
        assert kept.data.endswith(b"end") and len(kept.data) < 4 << 20
        assert kept.missed + len(kept.data) == kept.cursor == 20_000_003

    @promise
    async def test_an_ended_job_can_be_forgotten_and_a_running_one_cannot(self, sandbox: Sandbox) -> None:
        job = await sandbox.background("sleep 1000")
        with pytest.raises(InvalidRequest):
            sandbox.forget(job.id)
        await job.kill()
        await job.wait()
        sandbox.forget(job.id)
        assert sandbox.jobs() == []

    @promise
    async def test_a_job_that_cannot_start_is_no_job(self, sandbox: Sandbox) -> None:
        with pytest.raises(InvalidRequest):
            await sandbox.background(["no-such-program"])
        assert sandbox.jobs() == []

    @promise
    async def test_a_job_has_its_folder_and_user(self, sandbox: Sandbox) -> None:
        job = await sandbox.background("pwd; id -u", cwd="/tmp", user="root")
        await job.wait()
        assert await _attached(job) == b"/tmp\n0\n"


async def _attached(job: Job, cursor: int = 0) -> bytes:
    return b"".join([chunk async for chunk in job.attach(cursor)])


async def _logged(job: Job, mark: bytes) -> bytes:
    async def there() -> bool:
        return mark in job.log.read().data

    await eventually(there)
    return job.log.read().data


async def _grown(job: Job, cursor: int) -> bool:
    return job.log.read(cursor).cursor > cursor
