"""What is done about each way in which a session can be found broken, by a real fault, and what is never done."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.sessions.yard import Yard, inside, open_yard, prepare_hive, remove, seen, signal_inside

from skep.errors import SandboxLost, WorkspaceDamaged
from skep.sandbox.sandbox import Sandbox
from skep.sessions import putting_away
from skep.sessions.computer import Computer
from skep.sessions.computers import Computers, Condition, Held, Mended
from skep.sessions.recovery import Pace
from skep.sessions.session import Session
from skep.state.events import RoomReplaced, SessionChanged, WorkspaceRepaired
from skep.workspace.packages.packages import Installed


@pytest.fixture
async def yard(home: Path, ready_sqlite_url: str) -> AsyncIterator[Yard]:
    await prepare_hive(ready_sqlite_url, threads="thread")
    async with open_yard(home, ready_sqlite_url) as yard:
        yield yard


async def furnished(yard: Yard) -> dict[str, object]:
    """Have a computer with files of every kind, and return what is seen of them."""
    computer = await yard.resolve()
    made = await computer.run(
        "mkdir -m 750 deep && echo forty minutes > deep/work && chmod 600 deep/work && ln -s deep/work link "
        "&& echo '# changed' >> pyproject.toml && touch -d @1.5 deep/work deep"
    )
    assert made.ok, made.error_text
    return await seen(computer)


def birth(yard: Yard) -> str:
    """Return what tells a workspace from any other that may come under its id."""
    return yard.apiary.workspaces.show(yard.id()).birth


async def reasons(yard: Yard) -> list[str]:
    recorded = await yard.log.page(yard.hive.id, types=["session_changed"])
    return [one.event.reason for one in recorded if isinstance(one.event, SessionChanged)]


async def repairs(yard: Yard) -> list[WorkspaceRepaired]:
    recorded = await yard.log.page(yard.hive.id, types=["workspace_repaired"])
    return [one.event for one in recorded if isinstance(one.event, WorkspaceRepaired)]


def lost(repaired: WorkspaceRepaired) -> str:
    """Return what a repair says of files that are lost; the tiny snapshot has more that is not as it should be."""
    return "; ".join(loss for loss in repaired.left if ".venv" not in loss)


async def test_a_sandbox_that_is_gone_is_started_anew_over_the_same_workspace(yard: Yard) -> None:
    before, made = await furnished(yard), birth(yard)
    await yard.kill()
    assert await seen(await yard.resolve()) == before
    assert birth(yard) == made and yard.apiary.ids() == [yard.id()]
    assert len(inside(yard.hive.id)) == 1
    assert (await yard.steps())[-2:] == [("active", "resuming"), ("resuming", "active")]
    assert (await yard.session()).generation == 2


async def test_a_stopped_sandbox_is_started_and_found_healthy(yard: Yard) -> None:
    before, made = await furnished(yard), birth(yard)
    stopped = await putting_away.stop(yard.sessions, yard.id())
    assert stopped.status == "stopped" and not inside(yard.hive.id)
    assert await seen(await yard.resolve()) == before
    session = await yard.session()
    assert session.status == "active"
    assert session.healthy_at is not None and session.healthy_at > stopped.changed_at
    assert birth(yard) == made


async def test_an_archived_workspace_is_brought_back_and_found_healthy(yard: Yard) -> None:
    before = await furnished(yard)
    archived = await putting_away.archive(yard.sessions, yard.id())
    assert archived.status == "archived" and yard.apiary.ids() == []
    assert await seen(await yard.resolve()) == before
    session = await yard.session()
    assert session.status == "active" and session.unarchived_at is not None
    assert session.healthy_at is not None and session.healthy_at > archived.changed_at


async def test_a_server_that_hangs_is_restarted_within_the_limit(yard: Yard) -> None:
    before, made = await furnished(yard), birth(yard)
    assert signal_inside(yard.hive.id, signal.SIGSTOP) > 0
    async with asyncio.timeout(60):
        while (await yard.session()).generation == 1:
            computer = await yard.resolve()
            await asyncio.sleep(0.1)
    assert await seen(computer) == before
    assert birth(yard) == made and len(inside(yard.hive.id)) == 1


@dataclass(slots=True)
class Frozen:
    """A workspace whose every sandbox is halted by somebody as soon as it runs."""

    held: Held
    hive_id: str
    starts: list[str]

    async def sandbox(self) -> Sandbox:
        sandbox = await self.held.sandbox()
        self.starts.append(sandbox.id)
        signal_inside(self.hive_id, signal.SIGSTOP)
        return sandbox

    async def stop(self) -> None:
        await self.held.stop()

    async def leave(self) -> None:
        await self.held.leave()


@dataclass(slots=True)
class Freezing:
    """Real computers, each of which hangs from the start."""

    computers: Computers
    hive_id: str = ""
    starts: list[str] = field(default_factory=list)

    async def condition(self, session: Session) -> Condition:
        return await self.computers.condition(session)

    async def make(self, session: Session) -> None:
        await self.computers.make(session)

    @asynccontextmanager
    async def hold(self, session: Session) -> AsyncIterator[Held]:
        async with self.computers.hold(session) as held:
            yield Frozen(held, session.hive_id, self.starts)

    def join(self, session: Session) -> AbstractAsyncContextManager[Sandbox]:
        return self.computers.join(session)

    async def hand_over(self, session: Session) -> None:
        await self.computers.hand_over(session)

    async def install(self, session: Session, *, python: Sequence[str], node: Sequence[str]) -> Installed:
        return await self.computers.install(session, python=python, node=node)

    async def mend(self, session: Session) -> Mended:
        return await self.computers.mend(session)

    async def save(self, session: Session) -> str:
        return await self.computers.save(session)

    async def free(self, session: Session) -> None:
        await self.computers.free(session)

    async def unarchive(self, session: Session, archive: str) -> None:
        await self.computers.unarchive(session, archive)

    async def destroy(self, session: Session) -> None:
        await self.computers.destroy(session)


async def test_a_server_that_never_answers_is_not_waited_for_beyond_the_limit(
    home: Path, ready_sqlite_url: str
) -> None:
    await prepare_hive(ready_sqlite_url, threads="thread")
    async with open_yard(home, ready_sqlite_url) as yard:
        before = await furnished(yard)
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    made: list[Freezing] = []

    def freeze(computers: Computers) -> Computers:
        made.append(Freezing(computers))
        return made[0]

    async with open_yard(home, ready_sqlite_url, wrap=freeze, pace=Pace(limit_s=3.0, pause=pause)) as yard:
        with pytest.raises(SandboxLost, match="does not answer") as refused:
            async with asyncio.timeout(60):
                await yard.resolve()
        assert refused.value.hint is not None and "its files are safe" in refused.value.hint
        assert len(made[0].starts) == 2  # the first, and one restart
        assert set(pauses) == {0.2}
        session = await yard.session()
        assert (session.status, session.resume_fail_count) == ("error", 1)
        assert session.last_error == refused.value.message
        assert not inside(yard.hive.id)
    async with open_yard(home, ready_sqlite_url) as yard:
        assert await seen(await yard.resolve()) == before
        session = await yard.session()
        assert (session.status, session.resume_fail_count, session.last_error) == ("active", 0, None)


async def test_a_shell_that_is_gone_is_replaced_and_nobody_claims_that_its_variables_exist(yard: Yard) -> None:
    shell = await (await yard.resolve()).shell("main")
    assert not shell.replaced
    await shell.run("answer=42")
    assert (await shell.run("echo $answer")).text == "42\n"
    await yard.kill()
    shell = await (await yard.resolve()).shell("main")
    assert shell.replaced
    assert (await shell.run("echo [$answer]")).text == "[]\n"
    recorded = await yard.log.page(yard.hive.id, types=["room_replaced"])
    assert [(one.event.kind, one.event.name) for one in recorded if isinstance(one.event, RoomReplaced)] == [
        ("shell", "main")
    ]


async def test_a_workspace_that_lost_its_folder_is_put_together_again_without_a_loss(yard: Yard) -> None:
    before = await furnished(yard)
    await putting_away.stop(yard.sessions, yard.id())
    remove(yard.workspace())
    assert await seen(await yard.resolve()) == before
    (repaired,) = await repairs(yard)
    assert repaired.done and not lost(repaired)


async def test_a_workspace_that_lost_files_returns_to_its_last_good_state_and_says_what_is_lost(yard: Yard) -> None:
    before = await furnished(yard)
    await yard.apiary.workspaces.checkpoint(yard.id(), "good")
    await (await yard.resolve()).run("echo later > later")
    await putting_away.stop(yard.sessions, yard.id())
    remove(yard.trees()[0].parent)
    after = await seen(await yard.resolve())
    assert after == before and "/workspace/later" not in after
    (repaired,) = await repairs(yard)
    assert "everything since the checkpoint c0001 (good)" in lost(repaired)
    assert "its workspace is damaged" in await reasons(yard)


async def test_a_workspace_that_lost_everything_of_the_agent_s_is_never_silently_empty(yard: Yard) -> None:
    await furnished(yard)
    await putting_away.stop(yard.sessions, yard.id())
    remove(yard.trees()[0].parent)
    with pytest.raises(WorkspaceDamaged, match="could not be repaired") as refused:
        await yard.resolve()
    assert refused.value.hint is not None and "skep workspace health" in refused.value.hint
    assert (await yard.session()).status == "error" and not inside(yard.hive.id)


def lose(yard: Yard) -> None:
    """Remove a workspace with all that could tell what was in it."""
    for tree in yard.trees():
        remove(tree.parent)
    remove(yard.workspace())


async def refused(yard: Yard) -> WorkspaceDamaged:
    with pytest.raises(WorkspaceDamaged, match="is missing") as caught:
        await yard.resolve()
    return caught.value


async def test_a_workspace_that_is_missing_is_an_error_that_says_what_to_do_and_nothing_is_made(yard: Yard) -> None:
    await furnished(yard)
    await putting_away.stop(yard.sessions, yard.id())
    lose(yard)
    for count in (1, 2):
        error = await refused(yard)
        assert error.hint is not None and "--recreate" in error.hint
        session = await yard.session()
        assert (session.status, session.resume_fail_count, session.last_error) == ("error", count, error.message)
        assert yard.apiary.ids() == [] and not inside(yard.hive.id)


async def test_a_workspace_that_is_missing_is_made_anew_when_a_person_says_so(yard: Yard) -> None:
    await furnished(yard)
    await putting_away.stop(yard.sessions, yard.id())
    lose(yard)
    await refused(yard)
    computer = await yard.resolve(recreate=True)
    assert "/workspace/deep/work" not in await seen(computer)
    assert "its workspace was missing, and may be made anew" in await reasons(yard)
    assert await works(computer)


async def test_a_workspace_that_is_missing_is_made_anew_when_the_hive_s_upkeep_says_so(
    home: Path, ready_sqlite_url: str
) -> None:
    await prepare_hive(ready_sqlite_url, threads="thread", recreate_missing=True)
    async with open_yard(home, ready_sqlite_url) as yard:
        await furnished(yard)
        await yard.kill()
        lose(yard)
        assert await works(await yard.resolve())
        assert "its workspace was missing, and may be made anew" in await reasons(yard)


async def test_an_archive_from_before_the_last_work_never_stands_in_for_it_unasked(yard: Yard) -> None:
    await furnished(yard)
    await putting_away.archive(yard.sessions, yard.id())
    await (await yard.resolve()).run("echo an hour > later")
    await putting_away.stop(yard.sessions, yard.id())
    lose(yard)
    await refused(yard)
    assert yard.apiary.ids() == []


async def works(computer: Computer) -> bool:
    return (await computer.run("echo fine > fine")).ok
