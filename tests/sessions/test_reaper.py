"""What nobody uses is put away in time, what is at work never is, and what died is finished."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import update
from tests.sessions.conftest import Clock
from tests.sessions.yard import ACCOUNT, Yard, inside, open_yard, prepare_hive, seen

from skep.errors import NotFound
from skep.sandbox.sandbox import Process
from skep.sessions.computer import Computer
from skep.sessions.controller import Controller
from skep.sessions.ledger import Ledger
from skep.sessions.reaper import Reaper, Round
from skep.state.events import SessionChanged, SessionWarned
from skep.state.hives import Hives
from skep.state.leases import Leases
from skep.state.schema import sessions

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Host:
    """A yard with a reaper, and a clock that the test moves."""

    yard: Yard
    reaper: Reaper

    async def round(self) -> Round:
        did = await self.reaper.go_round()
        assert did is not None
        return did

    async def does(self, thread: str = "cli:default") -> str | None:
        """Go round once; return what was done about a session."""
        did = await self.round()
        assert not did.failed
        return did.done.get(self.yard.id(thread))

    async def reasons(self) -> list[str]:
        recorded = await self.yard.log.page(self.yard.hive.id, types=["session_changed"])
        return [one.event.reason for one in recorded if isinstance(one.event, SessionChanged)]


@pytest.fixture
async def host(home: Path, ready_url: str, clock: Clock) -> AsyncIterator[Host]:
    await prepare_hive(ready_url)
    async with open_yard(home, ready_url, ledger=partial(Ledger, now=clock)) as yard:
        yield Host(yard, reaper(yard))


def reaper(yard: Yard) -> Reaper:
    return Reaper(yard.sessions, Hives(yard.database, yard.log), Leases(yard.database))


async def until(holds: Callable[[], Awaitable[bool]], *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < deadline, "it did not come to be so"
        await asyncio.sleep(0.05)


async def idle(host: Host) -> bool:
    live = host.yard.sessions.live(host.yard.id())
    return live is not None and not await live.busy()


async def test_an_idle_session_is_stopped_on_time_and_not_before(host: Host, clock: Clock) -> None:
    await host.yard.resolve()
    clock.pass_(seconds=299)
    assert await host.does() is None
    assert inside(host.yard.hive.id)
    clock.pass_(seconds=1)
    assert await host.does() == "stop"
    session = await host.yard.session()
    assert (session.status, session.controller) == ("stopped", None)
    assert (await host.reasons())[-1] == "nobody used it for 300 s"
    assert not inside(host.yard.hive.id)
    assert await host.does() is None


async def test_each_use_puts_the_stop_off(host: Host, clock: Clock) -> None:
    computer = await host.yard.resolve()
    clock.pass_(seconds=200)
    await computer.run("true")
    clock.pass_(seconds=299)
    assert await host.does() is None
    assert (await host.yard.session()).active_at < clock()
    clock.pass_(seconds=1)
    assert await host.does() == "stop"


async def started(computer: Computer) -> Callable[[], Awaitable[None]]:
    process: Process = await computer.start("sleep 600")
    return process.kill


async def in_the_background(computer: Computer) -> Callable[[], Awaitable[None]]:
    return (await computer.background("sleep 600")).kill


async def a_daemon(computer: Computer) -> Callable[[], Awaitable[None]]:
    await computer.run("setsid nohup sleep 600 >/dev/null 2>&1 &")
    live = computer._live
    assert live is not None
    return live.sandbox.kill_all


@pytest.mark.parametrize("work", [started, in_the_background, a_daemon])
async def test_a_process_keeps_its_computer_up_past_the_limit_for_as_long_as_it_runs(
    host: Host, clock: Clock, work: Callable[[Computer], Awaitable[Callable[[], Awaitable[None]]]]
) -> None:
    end = await work(await host.yard.resolve())
    for _ in range(3):
        clock.pass_(hours=1)
        assert await host.does() is None
    assert (await host.yard.session()).active_at == clock()
    await end()
    await until(partial(idle, host))
    clock.pass_(seconds=299)
    assert await host.does() is None
    clock.pass_(seconds=1)
    assert await host.does() == "stop"


async def test_a_call_that_lasts_and_a_stream_that_is_open_keep_a_computer_up(host: Host, clock: Clock) -> None:
    computer = await host.yard.resolve()
    running = asyncio.create_task(computer.run("sleep 600", timeout_s=900))
    try:
        await until(lambda: asyncio.sleep(0, computer._live is not None and computer._live._uses > 0))
        clock.pass_(hours=1)
        assert await host.does() is None
    finally:
        running.cancel()
        await asyncio.wait([running])
    async with computer.files() as files:
        await files.write("note", b"text")
        clock.pass_(hours=1)
        assert await host.does() is None
    await until(partial(idle, host))
    clock.pass_(seconds=300)
    assert await host.does() == "stop"


async def test_an_open_context_keeps_a_computer_up_until_nobody_has_used_it_for_long(host: Host, clock: Clock) -> None:
    computer = await host.yard.resolve()
    room = await computer.context()
    assert (await room.run("x = 5")).outcome == "ok"
    clock.pass_(seconds=899)
    assert await host.does() is None
    clock.pass_(seconds=1)
    assert await host.does() is None  # the context is ended now
    await until(partial(idle, host))
    again = await computer.context()
    assert again.replaced and (await again.run("x")).outcome == "error"


async def test_a_session_of_one_second_is_stopped_and_one_at_work_is_not(home: Path, ready_sqlite_url: str) -> None:
    await prepare_hive(ready_sqlite_url, threads="thread", stop_after_s=1)
    async with open_yard(home, ready_sqlite_url) as yard:
        host = Host(yard, reaper(yard))
        await (await yard.resolve("cli:busy")).start("sleep 600")
        await yard.resolve("cli:idle")
        did: dict[str, object] = {}

        async def stopped() -> bool:
            did.update((await host.round()).done)
            return (await yard.session("cli:idle")).status == "stopped"

        await until(stopped)
        assert did == {yard.id("cli:idle"): "stop"}
        assert (await yard.session("cli:busy")).status == "active"


async def test_what_is_stopped_is_packed_away_and_comes_back_with_every_byte(
    host: Host, clock: Clock, home: Path
) -> None:
    computer = await host.yard.resolve()
    await computer.run("mkdir -p a/b; echo text >a/b/file; ln -s file a/b/link; chmod 640 a/b/file")
    before = await seen(computer)
    clock.pass_(seconds=300)
    assert await host.does() == "stop"
    clock.pass_(seconds=1799)
    assert await host.does() is None
    clock.pass_(seconds=1)
    assert await host.does() == "archive"
    session = await host.yard.session()
    assert session.status == "archived" and session.archive and not host.yard.workspace().exists()
    assert await seen(await host.yard.resolve()) == before


async def archived(host: Host, clock: Clock) -> None:
    await (await host.yard.resolve()).run("echo text >note")
    clock.pass_(seconds=300)
    assert await host.does() == "stop"
    clock.pass_(seconds=1800)
    assert await host.does() == "archive"


async def warnings(host: Host) -> list[str]:
    recorded = await host.yard.log.page(host.yard.hive.id, types=["session_warned"])
    return [one.event.delete_at for one in recorded if isinstance(one.event, SessionWarned)]


async def test_a_session_is_deleted_after_ninety_days_and_not_before_that_was_announced(
    host: Host, clock: Clock, home: Path
) -> None:
    used_at = clock()
    await archived(host, clock)
    clock.now = used_at
    clock.pass_(days=82, hours=23)
    assert await host.does() is None
    clock.pass_(hours=1)
    assert await host.does() == "warn"
    assert len(await warnings(host)) == 1
    clock.pass_(days=6, hours=23)
    assert await host.does() is None
    clock.pass_(hours=1)
    assert await host.does() == "delete"
    assert (await host.yard.session()).status == "destroyed"
    with pytest.raises(NotFound):
        await host.yard.apiary.archive().show(host.yard.id())
    assert not (await (await host.yard.resolve()).run("cat note")).ok
    assert len(await warnings(host)) == 1


async def test_who_uses_a_session_that_was_announced_to_go_keeps_it(host: Host, clock: Clock) -> None:
    await archived(host, clock)
    clock.pass_(days=83)
    assert await host.does() == "warn"
    assert (await (await host.yard.resolve()).run("cat note")).text == "text\n"
    clock.pass_(days=8)
    assert await host.does() == "stop"
    assert await host.does() is None
    clock.pass_(seconds=1800)
    assert await host.does() == "archive"
    clock.pass_(days=40)
    assert await host.does() is None


async def test_sessions_of_a_deleted_hive_are_put_away_too(host: Host, clock: Clock) -> None:
    await archived(host, clock)
    await host.yard.resolve()
    await Hives(host.yard.database, host.yard.log).delete("garden", account_id=ACCOUNT, actor="me")
    clock.pass_(seconds=300)
    assert await host.does() == "stop"
    clock.pass_(seconds=1800)
    assert await host.does() == "archive"


async def test_a_session_that_cannot_be_packed_away_is_reported_and_stays(host: Host, clock: Clock, home: Path) -> None:
    await (await host.yard.resolve()).run("echo text >note")
    clock.pass_(seconds=300)
    assert await host.does() == "stop"
    (home / "archives").write_text("no folder")
    clock.pass_(seconds=1800)
    did = await host.round()
    assert did.done == {} and list(did.failed) == [host.yard.id()]
    session = await host.yard.session()
    assert (session.status, session.controller) == ("stopped", None)
    assert session.last_error == did.failed[host.yard.id()]
    assert (await host.round()).failed == {}  # it is not tried again at once
    (home / "archives").unlink()
    clock.pass_(seconds=60)
    assert await host.does() == "archive"
    assert (await (await host.yard.resolve()).run("cat note")).text == "text\n"


async def test_one_process_of_a_host_goes_round_at_a_time(host: Host, clock: Clock) -> None:
    await host.yard.resolve()
    clock.pass_(seconds=300)
    leases = Leases(host.yard.database)
    other = await leases.acquire(f"reaper:{host.yard.ledger.host}", holder="another", ttl_s=60)
    assert other is not None
    assert await host.reaper.go_round() is None
    assert (await host.yard.session()).status == "active"
    await leases.release(other)
    assert await host.does() == "stop"


async def test_sessions_of_another_host_are_left_to_it(host: Host, home: Path, ready_url: str, clock: Clock) -> None:
    await host.yard.resolve()
    clock.pass_(days=1)
    async with open_yard(home, ready_url, host="elsewhere", ledger=partial(Ledger, now=clock)) as yard:
        assert (await Host(yard, reaper(yard)).round()).done == {}


async def test_a_guest_leaves_when_it_is_idle_and_the_one_that_runs_the_computer_decides_for_itself(
    host: Host, home: Path, ready_url: str, clock: Clock
) -> None:
    process = await (await host.yard.resolve()).start("sleep 600")
    async with open_yard(home, ready_url, ledger=partial(Ledger, now=clock)) as yard:
        guest = Host(yard, reaper(yard))
        computer = await yard.resolve()
        clock.pass_(seconds=300)
        assert await guest.does() is None  # the process is in sight, whoever started it
        assert await host.does() is None
        await process.kill()
        await until(partial(idle, guest))
        clock.pass_(seconds=9)
        assert await guest.does() is None
        assert await host.does() is None  # the guest is there
        clock.pass_(seconds=1)
        assert await guest.does() == "leave"
        assert (await host.yard.session()).status == "active"
        await until(partial(idle, host))
        clock.pass_(seconds=300)
        assert await host.does() == "stop"
        del computer


CHILD = """
import asyncio, sys
from pathlib import Path
from tests.sessions.yard import open_yard

async def main() -> None:
    async with open_yard(Path(sys.argv[1]), sys.argv[2]) as yard:
        computer = await yard.resolve()
        await computer.run("echo text >note")
        await computer.start("sleep 600")
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@asynccontextmanager
async def another_controller(home: Path, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the session of the hive in a process of its own, busy."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(home), url, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(60):
            assert await child.stdout.readline() == b"ready\n"
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_the_session_of_a_controller_that_was_killed_is_stopped_and_nothing_of_it_is_left(
    host: Host, home: Path, ready_url: str
) -> None:
    async with another_controller(home, ready_url) as child:
        assert inside(host.yard.hive.id)
        assert await host.does() is None  # it lives
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        assert await host.does() == "finish"
    session = await host.yard.session()
    assert (session.status, session.controller) == ("stopped", None)
    assert (await host.reasons())[-1] == "the process that ran it died"
    await until(lambda: asyncio.sleep(0, not inside(host.yard.hive.id)))
    assert (await (await host.yard.resolve()).run("cat note")).text == "text\n"


@asynccontextmanager
async def dying(host: Host, clock: Clock) -> AsyncIterator[Ledger]:
    """Be a controller of this host that is gone after the block, with whatever it had claimed."""
    controller = await Controller.start(Leases(host.yard.database), host.yard.ledger.host)
    yield Ledger(host.yard.database, host.yard.log, controller, now=clock)
    await controller.stop()


async def test_a_computer_whose_session_another_process_took_over_is_let_go_of(host: Host, clock: Clock) -> None:
    await (await host.yard.resolve()).run("echo text >note")
    async with dying(host, clock) as other:
        async with host.yard.database.write() as connection:  # as if this process had seemed dead
            taken = {"token": sessions.c.token + 1, "controller": other.controller}
            await connection.execute(update(sessions).values(taken))
        assert inside(host.yard.hive.id)
        before = await host.yard.session()
        assert await host.does() == "drop"
        assert not inside(host.yard.hive.id)
        assert await host.yard.session() == before
    assert (await (await host.yard.resolve()).run("cat note")).text == "text\n"


@pytest.mark.parametrize("about", ["deleting", "archiving"])
async def test_what_a_controller_was_about_when_it_died_is_brought_to_its_end(
    host: Host, clock: Clock, about: str
) -> None:
    before = await seen(await host.yard.resolve())
    clock.pass_(seconds=300)
    assert await host.does() == "stop"
    version = await host.yard.sessions.computers.save(await host.yard.session())
    async with dying(host, clock) as ledger:
        claimed = await ledger.claim(await host.yard.session(), reason="")
        assert claimed is not None
        if about == "deleting":
            await ledger.change(claimed, "destroyed", reason="somebody asked for it")
        else:
            await ledger.change(claimed, "archived", reason="somebody asked for it", archive=version)
        assert await host.does() is None  # it lives
    assert host.yard.workspace().exists()
    assert await host.does() == "finish"
    assert not host.yard.workspace().exists()
    assert (await host.yard.session()).controller is None
    assert await host.does() is None
    if about == "archiving":
        assert await seen(await host.yard.resolve()) == before


async def test_a_workspace_that_was_on_its_way_back_when_its_controller_died_counts_as_packed_away(
    host: Host, clock: Clock
) -> None:
    await archived(host, clock)
    async with dying(host, clock) as ledger:
        claimed = await ledger.claim(await host.yard.session(), reason="")
        assert claimed is not None
        await ledger.change(claimed, "resuming", reason="its workspace is packed away")
    assert await host.does() == "finish"
    assert (await host.yard.session()).status == "archived"
    assert (await (await host.yard.resolve()).run("cat note")).text == "text\n"
