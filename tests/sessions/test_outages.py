"""Sandboxes come from a machine that can be away: for a minute it is tried again, then the hive goes on without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.conftest import Clock
from tests.sessions.yard import ACCOUNT, THREAD, Yard, open_yard, prepare_hive

from skep.errors import SandboxDisabled, SandboxLost, Unavailable
from skep.sandbox.sandbox import Sandbox
from skep.sessions.computer import Computer
from skep.sessions.computers import Held
from skep.sessions.ledger import Ledger
from skep.sessions.outages import Outages
from skep.sessions.recovery import Pace
from skep.sessions.session import Session
from skep.state.database import Database
from skep.state.hives import Hive
from skep.state.log import EventLog


@dataclass(slots=True)
class Provider:
    """A server on loopback that says whether a sandbox can be had, and counts who asked."""

    status: int = 503
    asked: int = 0
    port: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        writer.write(f"HTTP/1.1 {self.status} said\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async def request(self) -> int:
        """Ask it, as a client does; return the status."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"POST /sandboxes HTTP/1.1\r\nHost: provider\r\n\r\n")
        line = await reader.readline()
        writer.close()
        return int(line.split()[1])


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    provider = Provider()
    server = await asyncio.start_server(provider.answer, "127.0.0.1", 0)
    provider.port = server.sockets[0].getsockname()[1]
    async with server:
        yield provider


@dataclass(slots=True)
class RemoteHeld:
    """A workspace whose sandbox is started when the provider agrees."""

    provider: Provider
    held: Held

    async def sandbox(self) -> Sandbox:
        if (status := await self.provider.request()) >= 500:
            raise Unavailable(f"the provider answered {status}", hint="wait")
        return await self.held.sandbox()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)


@dataclass(slots=True)
class Remote:
    """Computers of which all but the sandbox is here."""

    provider: Provider
    computers: Any

    @asynccontextmanager
    async def hold(self, session: Session) -> AsyncIterator[RemoteHeld]:
        async with self.computers.hold(session) as held:
            yield RemoteHeld(self.provider, held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.computers, name)


@dataclass(slots=True)
class Town:
    """A yard whose sandboxes are the provider's, on a clock that moves when somebody waits."""

    yard: Yard
    provider: Provider
    clock: Clock
    #: What to do once so much time has passed.
    later: dict[float, Any] = field(default_factory=dict)

    async def happened(self) -> list[str]:
        recorded = await self.yard.log.page(self.yard.hive.id, types=["outage_began", "outage_ended"])
        return [one.event.type for one in recorded]


@pytest.fixture
async def town(home: Path, ready_sqlite_url: str, provider: Provider, clock: Clock) -> AsyncIterator[Town]:
    await prepare_hive(ready_sqlite_url)
    began = clock()
    later: dict[float, Any] = {}

    async def pause(seconds: float) -> None:
        clock.pass_(seconds=seconds)
        for at in [at for at in later if (clock() - began).total_seconds() >= at]:
            later.pop(at)()
        await asyncio.sleep(0)

    pace = Pace(pause=pause, clock=lambda: clock().timestamp())
    ledger = partial(Ledger, now=clock)
    async with open_yard(
        home, ready_sqlite_url, pace=pace, ledger=ledger, wrap=lambda all_: Remote(provider, all_)
    ) as yard:
        yield Town(yard, provider, clock, later)


async def test_for_a_minute_a_sandbox_is_tried_again_and_then_the_hive_goes_on_without(town: Town) -> None:
    before = town.clock()
    computer = await town.yard.resolve()
    assert 60 <= (town.clock() - before).total_seconds() < 62
    assert town.provider.asked > 200  # every 0.2 s
    assert computer.down == "the provider answered 503"
    assert await town.happened() == ["outage_began"]
    with pytest.raises(SandboxDisabled, match="answered 503"):
        await computer.run("true")
    session = await town.yard.session()
    assert (session.status, session.last_error) == ("error", "the provider answered 503")
    assert session.resume_fail_count == 1


async def test_a_provider_that_is_back_within_the_minute_is_no_outage(town: Town) -> None:
    town.later[50.0] = lambda: setattr(town.provider, "status", 200)
    computer = await town.yard.resolve()
    assert computer.down is None and (await computer.run("echo here")).text == "here\n"
    assert await town.happened() == []
    assert await Outages(town.yard.database, town.yard.log, now=town.clock).of(town.yard.hive) is None


async def test_while_it_is_down_the_provider_is_asked_once_in_ten_seconds(town: Town) -> None:
    await town.yard.resolve()
    asked = town.provider.asked
    for _ in range(5):
        assert (await town.yard.resolve()).down
    assert town.provider.asked == asked
    town.clock.pass_(seconds=10)
    assert (await town.yard.resolve()).down
    assert (await town.yard.resolve()).down
    assert town.provider.asked == asked + 1
    assert await town.happened() == ["outage_began"]


async def test_after_the_recovery_the_hive_has_its_sandbox_and_its_files_again(town: Town) -> None:
    town.provider.status = 200
    computer = await town.yard.resolve()
    await computer.run("echo kept >note")
    async with computer.sandbox() as sandbox:
        await sandbox.stop()
    town.provider.status = 503
    assert (await town.yard.resolve()).down
    town.provider.status = 200
    town.clock.pass_(seconds=10)
    back = await town.yard.resolve()
    assert back.down is None and (await back.run("cat note")).text == "kept\n"
    assert await town.happened() == ["outage_began", "outage_ended"]
    session = await town.yard.session()
    assert (session.status, session.resume_fail_count, session.last_error) == ("active", 0, None)


async def test_a_task_whose_sandbox_is_lost_for_good_goes_on_without_and_is_not_lost(town: Town) -> None:
    town.provider.status = 200
    tried: list[str] = []

    async def work(computer: Computer) -> str:
        tried.append("down" if computer.down else "up")
        if computer.down:
            return f"answered without a sandbox: {computer.down}"
        town.provider.status = 503
        async with computer.sandbox() as sandbox:
            await sandbox.stop()
            await sandbox.run("true")
        raise AssertionError("a sandbox that was stopped runs nothing")

    reply = await town.yard.sessions.attempt(town.yard.hive, THREAD, work, account_id=ACCOUNT)
    assert tried == ["up", "down"]
    assert reply == "answered without a sandbox: the provider answered 503"


async def test_a_task_is_tried_once_more_after_a_recovery_and_not_again(town: Town) -> None:
    town.provider.status = 200
    tried: list[int] = []

    async def work(computer: Computer) -> None:
        tried.append(len(tried))
        async with computer.sandbox() as sandbox:
            await sandbox.stop()
            await sandbox.run("true")

    with pytest.raises(SandboxLost):
        await town.yard.sessions.attempt(town.yard.hive, THREAD, work, account_id=ACCOUNT)
    assert tried == [0, 1]


async def test_two_failures_with_nothing_tried_in_between_are_no_outage(
    database: Database, log: EventLog, hive: Hive, clock: Clock
) -> None:
    outages = Outages(database, log, now=clock)
    away = Unavailable("away")
    await outages.failed(hive, away)
    clock.pass_(hours=5)
    assert (await outages.failed(hive, away)).flipped_at is None
    for _ in range(6):
        assert (await outages.failed(hive, away)).flipped_at is None
        clock.pass_(seconds=10)
    assert (await outages.failed(hive, away)).flipped_at == clock()


async def test_of_many_that_see_an_outage_one_tells_of_it(
    database: Database, log: EventLog, hive: Hive, clock: Clock
) -> None:
    processes = [Outages(database, log, now=clock) for _ in range(6)]
    away = Unavailable("away")
    for _ in range(7):
        seen = await asyncio.gather(*(outages.failed(hive, away) for outages in processes))
        clock.pass_(seconds=10)
    assert all(outage.flipped_at for outage in seen)
    await asyncio.gather(*(outages.over(hive) for outages in processes))
    recorded = await log.page(hive.id, types=["outage_began", "outage_ended"])
    assert [one.event.type for one in recorded] == ["outage_began", "outage_ended"]
    assert await processes[0].of(hive) is None
