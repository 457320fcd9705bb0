"""A worker that lacks a package is told how to install it, and installs it once a person has allowed that."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic_ai.messages import ToolCallPart
from tests.agent.conftest import Bench, stamp
from tests.sessions.yard import ACCOUNT, open_yard, prepare_hive, remove
from tests.tasks.shop import workshop_at
from tests.workspace.market import Market, running_market
from tests.workspace.workbench import opened, template

from skep.agent.desk import Desk
from skep.agent.observations import CellRan, CommandEnded, PackagesInstalled, Trouble
from skep.agent.toolbox import Toolbox
from skep.agent.tools.shortfall import missing_packages
from skep.app.household import Household
from skep.governance.ruling import Policy, rule
from skep.models.models import Models
from skep.models.spec import ModelSpec
from skep.sandbox.egress.policy import parse_policy
from skep.state.events import PackagesInstalled as Recorded
from skep.tasks.workshop import open_worker
from skep.workspace.snapshot.indexes import Indexes

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCRIPT = """
turns:
 - when: {role: work, anywhere: 'call install_packages with .*"python", "names": ."pear".', results: 1}
   call: {tool: install_packages, arguments: {ecosystem: python, names: [pear]}}
 - {when: {role: work, results: 0}, call: {tool: run_command, arguments: {command: "python -c 'import pear'"}}}
 - {when: {role: work, tool: run_command}, call: {tool: finish, arguments: {reply: "{{result}}", confidence: 1}}}
 - {when: {role: work}, call: {tool: run_command, arguments: {command: "python -c 'import pear; print(pear)'"}}}
"""


@pytest.fixture(scope="module")
def market() -> Iterator[Market]:
    with running_market() as made:
        yield made


@pytest.fixture(scope="module")
def home(market: Market, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a home with a small environment of Python in it."""
    home = tmp_path_factory.mktemp("agent") / "home"
    home.mkdir(mode=0o700)
    asyncio.run(opened(home, market).build(template(home, "grove", python={"dependencies": []})))
    yield home
    remove(home)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bench(home: Path, market: Market, ready_sqlite: Path) -> AsyncIterator[Bench]:
    shutil.copy(ready_sqlite, home / "skep.db")
    await prepare_hive(f"sqlite:///{home / 'skep.db'}")
    sources = {"python_index": market.python_index, "upstreams": market.upstreams}
    settings = {"packages": sources, "workspace": {"template": "grove"}}
    async with open_yard(home, f"sqlite:///{home / 'skep.db'}", settings=settings) as yard:
        household = Household(home, yard.hive.id, ACCOUNT, yard.hive.name)
        household.settle()
        desk = Desk(yard.resolve, household=household.folder, skills=household.skills)
        yield Bench(yard, desk, household, Toolbox())
        await desk.close()


async def test_a_package_that_is_missed_is_there_for_good_once_it_is_installed(bench: Bench) -> None:
    lack = await bench.trouble("run_python", code="import apple")
    assert (lack.failure, lack.ecosystem, lack.packages) == ("missing_package", "python", ("apple",))
    seen = await bench.do("install_packages", ecosystem="python", names=["apple<2"])
    assert isinstance(seen, PackagesInstalled)
    assert (seen.versions, seen.note) == ({"apple": "1.0"}, "")
    ran = await bench.do("run_python", code="import apple; apple.VERSION")
    assert isinstance(ran, CellRan) and ran.value == "'1.0'"
    again = await bench.do("install_packages", ecosystem="python", names=["apple<2"])
    assert isinstance(again, PackagesInstalled) and not again.versions and "there already" in again.note
    events = [one.event for one in await bench.yard.log.page(bench.yard.hive.id, types=["packages_installed"])]
    assert events == [Recorded(python=("apple<2",))] * 2
    await bench.yard.kill()
    await bench.trouble("run_command", command="true")
    ran_after = await bench.do("run_command", command="python -c 'import apple'; cat pyproject.toml")
    assert isinstance(ran_after, CommandEnded) and ran_after.exit_code == 0 and "apple<2" in ran_after.stdout


async def test_what_cannot_be_installed_is_said_and_nothing_has_changed(bench: Bench, market: Market) -> None:
    unknown = await bench.trouble("install_packages", ecosystem="python", names=["durian"])
    assert (
        unknown.failure == "tool_refused" and "durian" in unknown.message and "nothing was changed" in unknown.message
    )
    market.closed = True
    try:
        closed = await bench.trouble("install_packages", ecosystem="python", names=["chestnut"])
    finally:
        market.closed = False
    assert closed.failure == "tool_error" and "index" in closed.message, closed.message


async def test_an_install_that_is_cancelled_ends_without_a_trace(bench: Bench) -> None:
    installing = asyncio.create_task(bench.do("install_packages", ecosystem="python", names=["endless"]))
    trial = bench.yard.workspace() / "install"
    async with asyncio.timeout(30):
        while not trial.exists():
            await asyncio.sleep(0.01)
        installing.cancel()
        with suppress(asyncio.CancelledError):
            await installing
    assert not trial.exists()
    bench.desk.timeouts["install_packages"] = 0.5
    late = await bench.trouble("install_packages", ecosystem="python", names=["endless"])
    bench.desk.timeouts["install_packages"] = 60
    assert late.failure == "tool_timeout" and not trial.exists()


async def test_a_worker_is_offered_the_very_call_and_a_person_is_asked(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "script.yaml").write_text(SCRIPT)
    yard = bench.yard
    models = Models([ModelSpec("rehearsal", str(tmp_path / "script.yaml"))])
    async with open_worker(workshop_at(yard, models)) as worker:
        task = await worker.tasks.submit(yard.hive, "Eat a pear", actor="me")
        async with asyncio.timeout(60):
            while (await worker.tasks.show(task.id, account_id=ACCOUNT)).status != "asking":
                await asyncio.sleep(0.02)
        await worker.tasks.answer(task.id, "yes", account_id=ACCOUNT, actor="me")
        task = await worker.tasks.wait(task.id, account_id=ACCOUNT, timeout_s=60)
    assert task.status == "succeeded" and task.reply is not None and "<module 'pear'" in task.reply


@pytest.mark.parametrize(
    ("output", "ecosystem", "packages"),
    [
        ("ModuleNotFoundError: No module named 'yaml'", "python", ("pyyaml",)),
        ("No module named honey.comb\nNo module named 'bee'", "python", ("honey", "bee")),
        ("ModuleNotFoundError: No module named 'asyncio.nothing'", "node", ()),
        ("Error: Cannot find module '@hive/comb/cell'\nRequire stack:", "node", ("@hive/comb",)),
        ("Cannot find package 'axios' imported from /workspace/a.mjs", "node", ("axios",)),
        ("Error: Cannot find module './mine'\nCannot find module '/workspace/x.js'", "node", ()),
        ("Cannot find package 'node:nothing'", "node", ()),
    ],
)
async def test_a_package_is_named_as_it_can_be_installed(
    output: str, ecosystem: str, packages: tuple[str, ...]
) -> None:
    assert missing_packages(output) == (ecosystem, packages)


@pytest.mark.parametrize(
    ("ecosystem", "name"),
    [
        ("python", "--index-url=http://elsewhere.test"),
        ("python", "apple @ http://elsewhere.test/apple.whl"),
        ("python", "../apple"),
        ("node", "git+ssh://elsewhere.test/apple"),
        ("node", "apple; rm -rf ."),
        ("ruby", "apple"),
    ],
)
async def test_what_is_not_the_name_of_a_package_is_not_even_ruled_on(ecosystem: str, name: str) -> None:
    call = ToolCallPart("install_packages", {"ecosystem": ecosystem, "names": [name]})
    read = Toolbox().parse(call, stamp())
    assert isinstance(read, Trouble) and read.failure == "invalid_arguments"


@pytest.mark.parametrize(
    ("allowed", "policy", "verdicts"),
    [
        ((), Policy(), ("ask", "ask")),
        (("market.test", "other.test"), Policy(), ("allow", "ask")),
        (("*.market.test",), Policy(), ("ask", "ask")),
        (("*.market.test:80,8080", "market.test:8080"), Policy(), ("ask", "allow")),
        ((), Policy(may_reach_out=frozenset({"install_packages"})), ("allow", "allow")),
        (("market.test",), Policy(denied=frozenset({"install_packages"})), ("deny", "deny")),
    ],
)
async def test_packages_are_asked_for_unless_their_hosts_or_the_act_are_listed(
    allowed: tuple[str, ...], policy: Policy, verdicts: tuple[str, str]
) -> None:
    sources = Indexes("http://market.test/simple", "http://registry.market.test:8080")
    toolbox = Toolbox(network=bool(allowed), listed=sources.listed(parse_policy(allowed)))
    for ecosystem, verdict in zip(("python", "node"), verdicts, strict=True):
        call = ToolCallPart("install_packages", json.dumps({"ecosystem": ecosystem, "names": ["apple"]}))
        action = toolbox.parse(call, stamp())
        assert not isinstance(action, Trouble)
        assert rule(toolbox.asked(action), policy).verdict == verdict
