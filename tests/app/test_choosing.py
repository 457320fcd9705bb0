"""What holds a sandbox is what was asked for, or a fallback that is strong enough, or nothing; never less, unsaid."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.app.lodgings import apiary_of
from tests.workspace.conftest import make_snapshot

from skep.app.choosing import Chooser, Demand, choose, demand
from skep.app.computer import open_sandbox
from skep.app.program import Program, open_program
from skep.app.reception import open_sessions
from skep.app.residence import THREAD
from skep.config import Paths, Settings
from skep.config.secrets import CloudKeys
from skep.errors import SandboxDisabled, SandboxUnusable
from skep.sandbox.erase import erase
from skep.state.events import FallbackChosen
from skep.state.hives import Hive

KEYS = CloudKeys()
#: No engine listens there.
NO_ENGINE = {"host": "unix:///nonexistent/engine.sock"}


def settings(**sandbox: Any) -> Settings:
    return Settings.model_validate({"sandbox": {"docker": NO_ENGINE, "gvisor": {"path": "/nonexistent"}, **sandbox}})


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    make_snapshot(folder)
    yield folder
    erase(str(folder), folder.stat().st_ino)


@pytest.fixture
async def program(home: Path) -> AsyncIterator[Program]:
    paths = Paths(config=home / "config.json", home=home, logs=home / "log")
    async with open_program(paths, settings()) as program:
        await program.accounts.create("bees")
        await program.hives.create("garden", account_id="bees", actor="test")
        yield program


async def configured(program: Program, **changes: object) -> Hive:
    return await program.hives.configure("garden", changes, account_id="bees", actor="test")


async def test_what_was_asked_for_is_chosen() -> None:
    choice = await choose(settings(), KEYS, demand(settings()))
    assert (choice.mechanism, choice.notice, choice.instead_of) == ("bubblewrap", "", None)


async def test_a_fallback_takes_the_place_of_what_cannot_be_used_and_says_so() -> None:
    wanted = settings(mechanism="docker", fallback=["bubblewrap"])
    choice = await choose(wanted, KEYS, demand(wanted))
    assert (choice.mechanism, choice.instead_of) == ("bubblewrap", "docker")
    assert "docker cannot be used: no engine answers" in choice.notice
    assert "less" not in choice.notice


async def test_a_weaker_fallback_is_used_only_where_the_demand_allows_it_and_says_that_it_is_weaker() -> None:
    wanted = settings(mechanism="gvisor", fallback=["bubblewrap"])
    choice = await choose(wanted, KEYS, demand(wanted))
    assert "bubblewrap, which isolates less (namespaces instead of kernel)" in choice.notice
    with pytest.raises(SandboxUnusable, match="gvisor: there is no /nonexistent; bubblewrap: its isolation") as refused:
        await choose(wanted, KEYS, Demand(("gvisor", "bubblewrap"), "kernel"))
    assert "sandbox.gvisor.path" in (refused.value.hint or "")


async def test_nothing_that_can_be_used_is_a_refusal_that_names_each() -> None:
    wanted = settings(mechanism="docker", fallback=["gvisor", "e2b", "daytona"])
    with pytest.raises(SandboxUnusable) as refused:
        await choose(wanted, KEYS, demand(wanted))
    for name in ("docker: ", "gvisor: ", "e2b: ", "daytona: "):
        assert name in refused.value.message


async def test_a_key_is_handed_to_its_own_mechanism_and_never_shown() -> None:
    wanted = settings(mechanism="e2b", isolation="machine")
    choice = await choose(wanted, CloudKeys("planted-secret", "other"), demand(wanted))
    assert choice.options["api_key"] == "planted-secret"
    assert "planted-secret" not in repr(choice)


async def test_a_cloud_holds_a_workspace_of_this_machine() -> None:
    wanted = settings(mechanism="e2b", fallback=["bubblewrap"])
    choice = await choose(wanted, CloudKeys("key", None), demand(wanted, needs=frozenset({"folder"})))
    assert (choice.mechanism, choice.instead_of, choice.elsewhere) == ("e2b", None, True)
    with pytest.raises(SandboxUnusable, match="list of hosts"):
        await choose(wanted, CloudKeys(None, "key"), Demand(("daytona",), needs=frozenset({"folder", "network"})))


async def test_what_cannot_filter_a_network_is_not_given_one() -> None:
    with pytest.raises(SandboxUnusable, match="list of hosts"):
        await choose(settings(), KEYS, Demand(("gvisor",), needs=frozenset({"network"})))


async def test_settings_that_switch_sandboxes_off_leave_one_that_refuses() -> None:
    off = settings(mechanism="disabled")
    async with open_sandbox(off, Chooser(off)) as sandbox:
        with pytest.raises(SandboxDisabled, match="switched off"):
            await sandbox.run("true")


async def test_a_hive_has_its_own_choice_over_the_settings(program: Program) -> None:
    hive = await configured(program, sandbox_mechanism="docker", sandbox_fallback=["gvisor"])
    assert demand(program.settings, hive).mechanisms == ("docker", "gvisor")
    hive = await configured(program, sandbox_mechanism=None, sandbox_fallback=None)
    assert demand(program.settings, hive).mechanisms == ("bubblewrap",)


async def test_a_hive_may_demand_more_than_the_settings_and_never_less(program: Program) -> None:
    hive = await configured(program, sandbox_isolation="kernel")
    assert demand(settings(), hive).isolation == "kernel"
    hive = await configured(program, sandbox_isolation="none")
    assert demand(settings(), hive).isolation == "namespaces"


async def test_a_hive_that_demands_more_than_there_is_gets_no_sandbox_and_its_workspace_stays(program: Program) -> None:
    async with open_sessions(program) as sessions:
        computer = await sessions.resolve(await configured(program), THREAD, account_id="bees")
        await computer.run("echo sown > bed")
    hive = await configured(program, sandbox_isolation="kernel")
    async with open_sessions(program) as sessions:
        with pytest.raises(SandboxUnusable, match="isolation is namespaces, and kernel is demanded"):
            await sessions.resolve(hive, THREAD, account_id="bees")
        apiary = apiary_of(sessions)
        (workspace_id,) = apiary.ids()
        async with apiary.at(workspace_id).hold(workspace_id) as workspace:
            with pytest.raises(
                SandboxUnusable, match="bubblewrap: its isolation is namespaces, and kernel is demanded"
            ):
                await workspace.sandbox()
            await workspace.checkpoint("kept")
    hive = await configured(program, sandbox_isolation=None)
    async with open_sessions(program) as sessions:
        computer = await sessions.resolve(hive, THREAD, account_id="bees")
        assert (await computer.run("cat bed")).text == "sown\n"


async def test_a_fallback_is_on_record_in_the_log_of_the_hive(program: Program) -> None:
    hive = await configured(program, sandbox_mechanism="docker", sandbox_fallback=["bubblewrap"])
    said: list[str] = []
    async with open_sessions(program, tell=said.append) as sessions:
        computer = await sessions.resolve(hive, THREAD, account_id="bees")
        assert (await computer.run("echo here")).text == "here\n"
    (recorded,) = await program.log.page(hive.id, types=["fallback_chosen"])
    assert isinstance(recorded.event, FallbackChosen)
    assert (recorded.event.mechanism, recorded.event.instead_of) == ("bubblewrap", "docker")
    assert recorded.event.why in said


async def test_a_hive_whose_sandbox_is_switched_off_has_a_computer_that_refuses_and_says_how_to_get_one(
    program: Program,
) -> None:
    hive = await configured(program, sandbox_enabled=False)
    async with open_sessions(program) as sessions:
        computer = await sessions.resolve(hive, THREAD, account_id="bees")
        assert computer.down is not None
        with pytest.raises(SandboxDisabled, match="hive garden is switched off") as refused:
            await computer.run("true")
        assert "sandbox_enabled=on" in (refused.value.hint or "")
    hive = await configured(program, sandbox_enabled=True)
    async with open_sessions(program) as sessions:
        assert (await (await sessions.resolve(hive, THREAD, account_id="bees")).run("true")).ok


async def test_the_workspace_of_a_hive_without_a_sandbox_can_be_kept_and_returned_to(program: Program) -> None:
    async with open_sessions(program) as sessions:
        computer = await sessions.resolve(await configured(program), THREAD, account_id="bees")
        await computer.run("echo sown > bed")
    await configured(program, sandbox_enabled=False)
    async with open_sessions(program) as sessions:
        apiary = apiary_of(sessions)
        (workspace_id,) = apiary.ids()
        async with apiary.at(workspace_id).hold(workspace_id) as workspace:
            kept = await workspace.checkpoint()
            await workspace.rollback(kept.id)
            with pytest.raises(SandboxDisabled, match="switched off"):
                await (await workspace.sandbox()).run("true")
        with pytest.raises(SandboxDisabled, match="switched off"):
            await apiary.install(workspace_id, python=["six"], node=[])
