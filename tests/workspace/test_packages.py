"""Packages are installed on demand as a whole or not at all, beside whatever runs in the workspace."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.workspace.market import wheel
from tests.workspace.orchard import Orchard, own_hash, said
from tests.workspace.tree_hash import tree_hash
from tests.workspace.ways import USUAL, WAYS

from skep.errors import (
    Conflict,
    InvalidRequest,
    PackageRefused,
    SkepError,
    StorageFull,
    Unavailable,
    WorkspaceBusy,
)
from skep.sandbox.limits import MIB, Limits
from skep.workspace.grounds import Layering
from skep.workspace.packages.packages import remove


@pytest.fixture
def layering() -> Layering:
    """Give the machine's own way to put workspaces together: an install is the same in all, but where it says so."""
    return USUAL


@pytest.fixture(autouse=True)
def _open_market(orchard: Orchard) -> Iterator[None]:
    yield
    orchard.market.closed = False
    orchard.market.held = ""
    orchard.market.gate.set()


@pytest.mark.parametrize("layering", WAYS)
async def test_an_installed_python_package_can_be_imported_with_what_it_needs(
    orchard: Orchard, layering: Layering
) -> None:
    async with orchard.workspace(layering) as workspace:
        done = await orchard.install(workspace, python=["pear"])
        assert done.python == {"apple": "1.0", "pear": "1.0"}
        sandbox = await workspace.sandbox()
        assert await said(sandbox, "python -c 'import pear, apple, tinypkg; print(apple.VERSION)'") == "1.0\n"
        declared = tomllib.loads(await said(sandbox, "cat pyproject.toml"))["project"]["dependencies"]
        assert declared == ["tinypkg", "pear>=1.0"]
        assert workspace.manifest.packages.python == ("pear>=1.0",)
        assert await said(sandbox, "ls .venv/lib/python3*/site-packages/apple/__pycache__")


async def test_an_installed_node_package_can_be_required_with_what_it_needs(
    orchard: Orchard, layering: Layering
) -> None:
    async with orchard.workspace(layering) as workspace:
        done = await orchard.install(workspace, node=["pear", "scripted@1"])
        assert done.node == {"pear": "1.0.0", "scripted": "1.0.0"}
        sandbox = await workspace.sandbox()
        assert await said(sandbox, 'node -p \'require("pear") + require("@orchard/apple")\'') == "84\n"
        assert await said(sandbox, "cat node_modules/scripted/built.txt") == "built\n"
        declared = json.loads(await said(sandbox, "cat package.json"))["dependencies"]
        assert declared == {"tinypkg": "*", "pear": "^1.0.0", "scripted": "^1.0.0"}
        assert workspace.manifest.packages.node == ("pear@^1.0.0", "scripted@^1.0.0")


async def test_what_runs_in_the_workspace_goes_on_during_an_install(orchard: Orchard, layering: Layering) -> None:
    async with orchard.workspace(layering) as workspace:
        sandbox = await workspace.sandbox()
        job = await sandbox.background("while :; do date > tick; sleep 0.01; done")
        await orchard.install(workspace, python=["apple"])
        assert job.running
        assert (await workspace.sandbox()).id == sandbox.id
        await said(sandbox, "rm tick; until test -s tick; do :; done; python -c 'import apple'")


async def test_a_package_from_source_is_built(orchard: Orchard, layering: Layering) -> None:
    async with orchard.workspace(layering) as workspace:
        await orchard.install(workspace, python=["sourced"])
        assert await said(await workspace.sandbox(), "python -c 'import sourced; print(sourced.ANSWER)'") == "7\n"


async def test_packages_that_are_there_keep_their_versions(orchard: Orchard) -> None:
    async with orchard.workspace() as workspace:
        await orchard.install(workspace, python=["apple==1.0"])
        done = await orchard.install(workspace, python=["pear", "sourced"])
        assert done.python == {"pear": "1.0", "sourced": "1.0"}
        assert workspace.manifest.packages.python == ("apple==1.0", "pear>=1.0", "sourced>=1.0")


async def test_another_version_takes_the_place_of_the_one_that_is_there(orchard: Orchard, layering: Layering) -> None:
    async with orchard.workspace(layering) as workspace:
        sandbox = await workspace.sandbox()
        await orchard.install(workspace, python=["apple<2"], node=["@orchard/apple@1"])
        await orchard.install(workspace, python=["apple>=2"], node=["@orchard/apple@2"])
        assert await said(sandbox, "python -c 'import apple; print(apple.VERSION)'") == "2.0\n"
        assert await said(sandbox, "ls -d .venv/lib/python3*/site-packages/apple-* | wc -l") == "1\n"
        assert await said(sandbox, "node -p 'require(\"@orchard/apple/package.json\").version'") == "2.0.0\n"
        assert workspace.manifest.packages.python == ("apple>=2",)


async def test_a_package_that_another_needs_in_another_version_moves_with_it(orchard: Orchard) -> None:
    async with orchard.workspace() as workspace:
        await orchard.install(workspace, python=["apple"])
        done = await orchard.install(workspace, python=["apple", "pear"])
        assert done.python == {"apple": "1.0", "pear": "1.0"}


FAILURES = {
    "unknown": ({"python": ["nowhere-to-be-found"]}, PackageRefused, "there is no package nowhere-to-be-found"),
    "no such version": ({"python": ["apple>=9"]}, PackageRefused, "apple"),
    "conflict": ({"python": ["pear", "plum"]}, PackageRefused, "pear and plum cannot be had together"),
    "conflict with what is there": ({"python": ["tinypkg>=2"]}, PackageRefused, "tinypkg"),
    "failed build": ({"python": ["brittle"]}, PackageRefused, "brittle.*the oven is cold"),
    "one of several": ({"python": ["apple", "brittle"]}, PackageRefused, "brittle"),
    "unknown to npm": ({"node": ["nowhere-to-be-found"]}, PackageRefused, "nowhere-to-be-found"),
    "failed script": ({"node": ["scripted", "brittle"]}, PackageRefused, "brittle.*the oven is cold"),
    "python well, node not": ({"python": ["apple"], "node": ["brittle"]}, PackageRefused, "brittle"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_an_install_that_fails_changes_nothing_and_names_the_package(
    orchard: Orchard, layering: Layering, failure: str
) -> None:
    packages, error, message = FAILURES[failure]
    async with orchard.workspace(layering) as workspace:
        sandbox = await workspace.sandbox()
        before, manifest = await tree_hash(sandbox), workspace.manifest
        with pytest.raises(error, match=message) as raised:
            await orchard.install(workspace, **packages)
        assert "nothing was changed" in str(raised.value.hint)
        assert await tree_hash(sandbox) == before
        assert workspace.manifest == manifest
        assert not (workspace.folder / "install").exists()


async def test_an_index_that_is_away_is_told_of_and_nothing_changes(orchard: Orchard) -> None:
    async with orchard.workspace() as workspace:
        sandbox = await workspace.sandbox()
        before = await tree_hash(sandbox)
        orchard.market.closed = True
        with pytest.raises(Unavailable, match="package index"):
            await orchard.install(workspace, python=["plum"])
        assert await tree_hash(sandbox) == before


@pytest.mark.parametrize("taken_mb", [18, 22])
async def test_a_package_for_which_there_is_no_room_is_refused(
    orchard: Orchard, layering: Layering, taken_mb: int
) -> None:
    limits = Limits(disk_bytes=24 * MIB)
    async with orchard.workspace(layering, limits=limits) as workspace:
        sandbox = await workspace.sandbox()
        await said(sandbox, f"head -c {taken_mb}M /dev/urandom > taken; sync taken")
        job = await sandbox.background("sleep 100")
        before = await tree_hash(sandbox)
        with pytest.raises(StorageFull, match="room"):
            await orchard.install(workspace, python=["heavy"])
        assert await tree_hash(sandbox) == before
        assert job.running


async def test_what_the_agent_wrote_into_the_files_stays_in_them(orchard: Orchard, layering: Layering) -> None:
    async with orchard.workspace(layering) as workspace:
        sandbox = await workspace.sandbox()
        await sandbox.files.write("pyproject.toml", "# mine\n[project]\nname = 'x'\nversion = '3'\n[tool.y]\nz = 1\n")
        await sandbox.files.write("package.json", '{"type": "module", "dependencies": {"tinypkg": "^1"}, "x": [1]}')
        await orchard.install(workspace, python=["apple[juice]<2"], node=["@orchard/apple@^1"])
        text = await said(sandbox, "cat pyproject.toml")
        assert text.startswith("# mine\n")
        assert tomllib.loads(text) == {
            "project": {"name": "x", "version": "3", "dependencies": ["apple[juice]<2"]},
            "tool": {"y": {"z": 1}},
        }
        package = json.loads(await said(sandbox, "cat package.json"))
        assert (package["type"], package["x"]) == ("module", [1])
        assert set(package["dependencies"]) == {"tinypkg", "@orchard/apple"}


async def test_a_half_written_file_is_kept_under_another_name(orchard: Orchard, layering: Layering) -> None:
    async with orchard.workspace(layering) as workspace:
        sandbox = await workspace.sandbox()
        await orchard.install(workspace, python=["sourced"])
        broken = b"[project]\ndependencies = ['tiny"
        await sandbox.files.write("pyproject.toml", broken)
        await sandbox.files.write("package.json", b'{"dependencies": {')
        await sandbox.files.write("pyproject.toml.broken", b"an older one")
        done = await orchard.install(workspace, python=["apple"], node=["pear"])
        assert done.aside == ("pyproject.toml.broken-2", "package.json.broken")
        assert await sandbox.files.read("pyproject.toml.broken-2") == broken
        assert await sandbox.files.read("package.json.broken") == b'{"dependencies": {'
        assert await sandbox.files.read("pyproject.toml.broken") == b"an older one"
        declared = tomllib.loads(await said(sandbox, "cat pyproject.toml"))["project"]["dependencies"]
        assert declared == ["tinypkg", "sourced>=1.0", "apple>=2.0"]
        assert set(json.loads(await said(sandbox, "cat package.json"))["dependencies"]) == {"tinypkg", "pear"}


async def test_files_that_are_missing_are_made(orchard: Orchard) -> None:
    async with orchard.workspace() as workspace:
        sandbox = await workspace.sandbox()
        await said(sandbox, "rm pyproject.toml package.json package-lock.json")
        await orchard.install(workspace, python=["apple<2"], node=["pear"])
        declared = tomllib.loads(await said(sandbox, "cat pyproject.toml"))["project"]["dependencies"]
        assert declared == ["apple<2"]
        assert "pear" in json.loads(await said(sandbox, "cat package.json"))["dependencies"]


@pytest.mark.parametrize(
    "packages",
    [
        {"python": ["--index-url=http://elsewhere.test"]}, {"python": ["./here"]}, {"python": ["/etc"]},
        {"python": ["https://elsewhere.test/a.whl"]}, {"python": ["a @ git+https://elsewhere.test/a"]},
        {"python": ["apple\n--pre"]}, {"python": [""]}, {"python": ["apple", "Apple"]}, {},
        {"node": ["--registry=http://elsewhere.test"]}, {"node": ["../up"]}, {"node": ["file:x"]},
        {"node": ["github:a/b"]}, {"node": ["http://elsewhere.test/a.tgz"]}, {"node": ["x@npm:y"]},
        {"node": ["pear", "pear@1"]},
    ],
    ids=str,
)  # fmt: skip
async def test_what_is_not_the_name_of_a_package_is_refused(orchard: Orchard, packages: dict[str, list[str]]) -> None:
    asked = len(orchard.market.asked)
    async with orchard.workspace() as workspace:
        with pytest.raises(InvalidRequest):
            await orchard.install(workspace, **packages)
    assert len(orchard.market.asked) == asked


async def test_one_install_at_a_time(orchard: Orchard) -> None:
    market = orchard.market
    async with orchard.workspace() as workspace:
        market.gate.clear()
        market.waiting.clear()
        market.held = "simple/plum"
        first = asyncio.create_task(orchard.install(workspace, python=["plum"]))
        await asyncio.to_thread(market.waiting.wait, 30)
        with pytest.raises(WorkspaceBusy, match="another install is under way"):
            await orchard.install(workspace, python=["apple"])
        market.gate.set()
        assert "plum" in (await first).python


async def test_an_install_that_is_cancelled_changes_nothing(orchard: Orchard, layering: Layering) -> None:
    market = orchard.market
    async with orchard.workspace(layering) as workspace:
        before = await tree_hash(await workspace.sandbox())
        market.gate.clear()
        market.waiting.clear()
        market.held = "simple/lonely"
        market.python["lonely"] = {"lonely-1.0-py3-none-any.whl": wheel("lonely", "1.0", {"lonely.py": ""})}
        task = asyncio.create_task(orchard.install(workspace, python=["lonely"]))
        await asyncio.to_thread(market.waiting.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await tree_hash(await workspace.sandbox()) == before
        assert not (workspace.folder / "install").exists()


@pytest.mark.parametrize("layering", WAYS)
async def test_a_rollback_takes_packages_along(orchard: Orchard, layering: Layering) -> None:
    async with orchard.workspace(layering) as workspace:
        await orchard.install(workspace, python=["apple"])
        sandbox = await workspace.sandbox()
        before = await tree_hash(sandbox)
        await workspace.checkpoint("before")
        await orchard.install(workspace, python=["sourced"], node=["pear"])
        await workspace.rollback("before")
        assert await tree_hash(await workspace.sandbox()) == before
        assert workspace.manifest.packages.python == ("apple>=2.0",)
        assert workspace.manifest.packages.node == ()


async def test_a_rollback_in_the_middle_of_an_install_wins(orchard: Orchard, layering: Layering) -> None:
    market = orchard.market
    async with orchard.workspace(layering) as workspace:
        await workspace.checkpoint("before")
        market.python["late"] = {"late-1.0-py3-none-any.whl": wheel("late", "1.0", {"late.py": ""})}
        market.gate.clear()
        market.waiting.clear()
        market.held = "simple/late"
        task = asyncio.create_task(orchard.install(workspace, python=["late"]))
        await asyncio.to_thread(market.waiting.wait, 30)
        await said(await workspace.sandbox(), "echo more > more")
        await workspace.rollback("before")
        before = await tree_hash(await workspace.sandbox())
        market.gate.set()
        with pytest.raises(WorkspaceBusy, match="rolled back"):
            await task
        assert await tree_hash(await workspace.sandbox()) == before


async def test_a_checkpoint_in_the_middle_of_an_install_does_not_stop_it(orchard: Orchard) -> None:
    market = orchard.market
    async with orchard.workspace() as workspace:
        market.python["later"] = {"later-1.0-py3-none-any.whl": wheel("later", "1.0", {"later.py": ""})}
        market.gate.clear()
        market.waiting.clear()
        market.held = "simple/later"
        task = asyncio.create_task(orchard.install(workspace, python=["later"]))
        await asyncio.to_thread(market.waiting.wait, 30)
        await said(await workspace.sandbox(), "echo more > more")
        await workspace.checkpoint()
        market.gate.set()
        await task
        assert await said(await workspace.sandbox(), "cat more; python -c 'import later'") == "more\n"


async def test_forks_have_the_packages_and_their_record(orchard: Orchard, layering: Layering) -> None:
    workspaces = orchard.workspaces(layering)
    source = await orchard.planted(workspaces)
    await orchard.install_into(workspaces, source, python=["apple"])
    (made,) = await workspaces.fork(source, [f"{source}-fork"])
    assert made.packages.python == ("apple>=2.0",)
    async with workspaces.enter(made.id) as sandbox:
        await said(sandbox, "python -c 'import apple'")


async def test_a_removed_package_is_gone_and_no_longer_declared(orchard: Orchard, layering: Layering) -> None:
    async with orchard.workspace(layering) as workspace:
        await orchard.install(workspace, python=["apple", "sourced"], node=["pear", "scripted"])
        sandbox = await workspace.sandbox()
        mine = await own_hash(sandbox)
        source = orchard.snapshots
        await remove(workspace, python=["Apple"], node=["pear"], indexes=source.indexes, cache=source.cache)
        assert not (await sandbox.run("python -c 'import apple'")).ok
        assert not (await sandbox.run("node -e 'require(\"pear\")'")).ok
        await said(sandbox, "python -c 'import sourced, tinypkg' && node -e 'require(\"scripted\")'")
        assert workspace.manifest.packages.python == ("sourced>=1.0",)
        assert workspace.manifest.packages.node == ("scripted@^1.0.0",)
        declared = tomllib.loads(await said(sandbox, "cat pyproject.toml"))["project"]["dependencies"]
        assert declared == ["tinypkg", "sourced>=1.0"]
        assert await own_hash(sandbox) == mine


async def test_what_came_with_the_template_is_not_removed(orchard: Orchard) -> None:
    async with orchard.workspace() as workspace:
        source = orchard.snapshots
        with pytest.raises(InvalidRequest, match=r"tinypkg.*was not installed"):
            await remove(workspace, python=["tinypkg"], indexes=source.indexes, cache=source.cache)


async def test_another_process_has_the_holder_install(orchard: Orchard, layering: Layering) -> None:
    async with orchard.workspace(layering) as workspace:
        sandbox = await workspace.sandbox()
        others = orchard.workspaces(layering)
        done = await others.act(workspace.id, "install", {"python": ["apple<2"], "node": []})
        assert done == {"python": {"apple": "1.0"}, "node": {}, "aside": []}
        with pytest.raises(PackageRefused, match="nowhere-to-be-found"):
            await others.act(workspace.id, "install", {"python": ["nowhere-to-be-found"]})
        await said(sandbox, "python -c 'import apple'")


async def test_a_suspended_workspace_takes_no_packages(orchard: Orchard) -> None:
    async with orchard.workspace() as workspace:
        await workspace.suspend()
        with pytest.raises(Conflict, match="suspended"):
            await orchard.install(workspace, python=["apple"])


async def test_files_of_packages_may_have_any_name(orchard: Orchard, layering: Layering) -> None:
    odd = {"odd/__init__.py": "", "odd/it's; touch pwned #.txt": "1", "odd/-rf": "2", "odd/sp ace/$(id)": "3"}
    orchard.market.python["odd"] = {"odd-1.0-py3-none-any.whl": wheel("odd", "1.0", odd)}
    async with orchard.workspace(layering) as workspace:
        await orchard.install(workspace, python=["odd"])
        sandbox = await workspace.sandbox()
        names = await said(sandbox, "cd .venv/lib/python3*/site-packages && find odd -type f -not -name '*.pyc' | sort")
        assert names.splitlines() == sorted(odd)
        assert not (await sandbox.run("test -e pwned")).ok


@pytest.mark.parametrize("layering", WAYS)
async def test_the_agents_own_files_are_untouched_by_installs(orchard: Orchard, layering: Layering) -> None:
    async with orchard.workspace(layering) as workspace:
        sandbox = await workspace.sandbox()
        before = await own_hash(sandbox)
        await orchard.install(workspace, python=["pear", "sourced"], node=["scripted"])
        with pytest.raises(SkepError):
            await orchard.install(workspace, python=["brittle"])
        assert await own_hash(sandbox) == before


async def test_a_workspace_without_python_says_so(orchard: Orchard, tmp_path: Path) -> None:
    workspaces = orchard.workspaces()
    plain = orchard.home / "workspaces" / "plain"
    plain.mkdir(parents=True)
    (plain / "note").write_text("mine")
    async with workspaces.hold("plain") as workspace:
        with pytest.raises(InvalidRequest, match="no environment of Python"):
            await orchard.install(workspace, python=["apple"])
