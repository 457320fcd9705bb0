"""A template becomes an environment that works at its final path, and a build that fails says which package it was."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from tests.workspace.market import HOST, Market, running_market
from tests.workspace.workbench import contents, need_node, opened, shelf_names, template

from skep.errors import LimitReached, PackageRefused, SkepError, StorageFull, TemplateInvalid, Unavailable
from skep.sandbox.layering import layering
from skep.sandbox.limits import MIB
from skep.sandbox.sandbox import Execution, Sandbox
from skep.sandbox.stack import Stack
from skep.workspace.snapshot.build import LIMITS
from skep.workspace.snapshot.snapshot import Snapshot


@pytest.fixture
def market() -> Iterator[Market]:
    with running_market() as running:
        yield running


async def inside(snapshot: Snapshot, folder: Path, *commands: str) -> list[Execution]:
    """Run commands in a sandbox that has the snapshot as its lowest layer, as a workspace has."""
    if layering() == "none":
        pytest.skip("this kernel lays no folders over each other")
    for name in ("upper", "work"):
        (folder / name).mkdir(parents=True)
    stack = Stack(str(folder / "upper"), str(folder / "work"), (str(snapshot.tree),))
    async with Sandbox.create(stack=stack, env=snapshot.environment) as sandbox:
        return [await sandbox.run(command) for command in commands]


async def test_packages_of_both_kinds_work_over_the_snapshot(market: Market, tmp_path: Path) -> None:
    need_node()
    python = {"dependencies": ["pear", "chestnut>=1", "sourced"]}
    template(tmp_path, "full", python=python, nodejs={"dependencies": ["@orchard/apple@^1", "scripted"]})
    told: list[str] = []
    built = await opened(tmp_path, market).build("full", on_progress=told.append)
    assert dict(built.python_packages) == {"apple": "1.0", "chestnut": "1.0", "pear": "1.0", "sourced": "1.0"}
    assert dict(built.node_packages) == {"@orchard/apple": "1.0.0", "scripted": "1.0.0"}
    assert told[0] == "choosing versions"
    assert told[-1] == f"making {built.version} the latest"
    ran = await inside(
        built,
        tmp_path / "over",
        "python -c 'import pear, apple, sourced; print(apple.VERSION, sourced.ANSWER)'",
        "node -e 'console.log(require(\"@orchard/apple\"))'; cat node_modules/scripted/built.txt",
    )
    assert [one.text for one in ran] == ["1.0 7\n", "42\nbuilt\n"], [one.error_text for one in ran]


async def test_what_was_asked_for_is_declared_where_the_tools_look_for_it(market: Market, tmp_path: Path) -> None:
    need_node()
    python = {"version": ">=3.8", "dependencies": ["apple<2", "tinypkg"]}
    template(tmp_path, "declared", python=python, nodejs={"dependencies": ["tinypkg", "@orchard/apple@^1.0"]})
    tree = (await opened(tmp_path, market).build("declared")).tree
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["apple<2", "tinypkg"]
    assert project["requires-python"] == ">=3.8"
    declared = json.loads((tree / "package.json").read_text())
    assert declared["dependencies"] == {"tinypkg": "*", "@orchard/apple": "^1.0"}
    assert "node_modules/tinypkg" in json.loads((tree / "package-lock.json").read_text())["packages"]


async def test_every_module_is_compiled_and_the_kernel_shows_it_as_fresh(market: Market, tmp_path: Path) -> None:
    template(tmp_path, "compiled", python={"dependencies": ["pear", "tinypkg"]})
    built = await opened(tmp_path, market).build("compiled")
    modules = list((built.tree / ".venv/lib").rglob("*.py"))
    assert len(modules) >= 3
    # Compiled by the snapshot's Python, which may be another than this one.
    tags = {path.name.rsplit(".", 2)[1] for path in (built.tree / ".venv/lib").rglob("*.pyc")}
    assert len(tags) == 1
    for module in modules:
        compiled = Path(cache_from_source(str(module)))
        assert list(compiled.parent.glob(f"{module.stem}.*.pyc")), module
    (ran,) = await inside(built, tmp_path / "over", "python -v -c 'import tinypkg' 2>&1 | grep tinypkg")
    assert "matches" in ran.text
    assert "wrote" not in ran.text


async def test_nothing_of_the_build_is_left_in_the_tree(market: Market, tmp_path: Path) -> None:
    template(tmp_path, "clean", python={"dependencies": ["sourced"]})
    built = await opened(tmp_path, market).build("clean")
    names = {path.name for path in built.tree.iterdir()}
    assert names == {".venv", "attachments", "hive", "output", "pyproject.toml"}
    modes = {path.lstat().st_mode & 0o7777 for path in built.tree.rglob("*") if not path.is_symlink()}
    assert modes <= {0o755, 0o644}
    assert b"$ /opt/skep/uv pip install" in built.log.read_bytes()


async def test_other_versions_on_the_index_are_another_version_of_the_snapshot(market: Market, tmp_path: Path) -> None:
    template(tmp_path, "moving", python={"dependencies": ["apple"]})
    newest = market.python["apple"]
    market.python["apple"] = {name: data for name, data in newest.items() if "2.0" not in name}
    snapshots = opened(tmp_path, market)
    first = await snapshots.build("moving")
    market.python["apple"] = newest
    second = await snapshots.build("moving")
    assert first.python_packages["apple"] == "1.0"
    assert second.python_packages["apple"] == "2.0"
    assert first.hash != second.hash
    market.asked.clear()
    market.python["apple"] = {name: data for name, data in newest.items() if "2.0" not in name}
    assert await snapshots.build("moving") == first
    assert snapshots.latest("moving") == first
    assert not [path for path in market.asked if path.startswith("/files/apple/apple-1.0")]


async def test_a_node_that_is_not_here_comes_with_the_snapshot(market: Market, tmp_path: Path) -> None:
    need_node()
    template(tmp_path, "newer", nodejs={"version": ">=90 <91", "dependencies": ["scripted"]})
    built = await opened(tmp_path, market).build("newer")
    assert (built.node, built.python) == ("90.0.0", None)
    ran = await inside(built, tmp_path / "over", "node --version; cat node_modules/scripted/built.txt", "npm --version")
    assert ran[0].text == "v90.0.0\nbuilt\n"
    assert ran[1].ok


async def test_bun_comes_as_a_package(market: Market, tmp_path: Path) -> None:
    need_node()
    template(tmp_path, "bunny", nodejs={"runtime": "bun", "version": "^1.9", "dependencies": ["tinypkg"]})
    built = await opened(tmp_path, market).build("bunny")
    assert dict(built.node_packages) == {"bun": "1.9.9", "tinypkg": "1.0.0"}
    (ran,) = await inside(built, tmp_path / "over", "bun --version")
    assert ran.text == "1.9.9\n"


async def test_packages_for_other_machines_are_neither_fetched_nor_named(market: Market, tmp_path: Path) -> None:
    need_node()
    template(tmp_path, "sided", nodejs={"dependencies": ["many-sided"]})
    built = await opened(tmp_path, market).build("sided")
    named = {name for name in built.node_packages if name.startswith("side-")}
    assert (
        named == {path.name for path in (built.tree / "node_modules").glob("side-*")} == {"side-here", "side-anywhere"}
    )
    fetched = {path for path in market.asked if "/-/" in path}
    assert not [path for path in fetched if "/side-there/" in path or "/side-not-here/" in path]


FAILURES: dict[str, tuple[dict[str, object], type[SkepError], str]] = {
    "unknown": ({"python": {"dependencies": ["tinypkg", "no-such-thing"]}}, PackageRefused, "no package no-such-thing"),
    "version": ({"python": {"dependencies": ["apple>=9"]}}, PackageRefused, "no version of apple that fits apple>=9"),
    "conflict": (
        {"python": {"dependencies": ["pear", "tinypkg", "plum"]}},
        PackageRefused,
        "pear and plum cannot be had together",
    ),
    "build": ({"python": {"dependencies": ["brittle"]}}, PackageRefused, "brittle==1.0 cannot be built.*oven is cold"),
    "python": ({"python": {"version": ">=3.38"}}, TemplateInvalid, r"needs Python >=3.38; .*: 3\.\d+"),
    "node": ({"nodejs": {"version": ">=99"}}, TemplateInvalid, r"no Node fits \(>=99"),
    "node-unknown": ({"nodejs": {"dependencies": ["no-such-thing"]}}, PackageRefused, "no package no-such-thing"),
    "node-below": ({"nodejs": {"dependencies": ["lost-child"]}}, PackageRefused, "no package nowhere-to-be-found"),
    "node-version": ({"nodejs": {"dependencies": ["tinypkg@^9"]}}, PackageRefused, r"no version of tinypkg .* \^9"),
    "node-conflict": (
        {"nodejs": {"dependencies": ["@orchard/apple@1.0.0", "plum"]}},
        PackageRefused,
        "@orchard/apple and plum cannot be had together",
    ),
    "node-build": ({"nodejs": {"dependencies": ["brittle"]}}, PackageRefused, "brittle cannot be built.*oven is cold"),
}


@pytest.mark.parametrize("which", FAILURES)
async def test_a_failed_build_names_the_culprit_and_leaves_the_old_version(
    which: str, market: Market, tmp_path: Path
) -> None:
    parts, kind, said = FAILURES[which]
    if "nodejs" in parts:
        need_node()
    snapshots = opened(tmp_path, market)
    template(tmp_path, "changing", python={"dependencies": ["tinypkg"]})
    before = await snapshots.build("changing")
    kept = contents(before.folder)
    template(tmp_path, "changing", **parts)
    with pytest.raises(kind, match=said) as caught:
        await snapshots.build("changing")
    assert caught.value.hint
    assert snapshots.latest("changing") == before
    assert contents(before.folder) == kept
    assert shelf_names(tmp_path, "changing") == {before.version, "latest"}
    template(tmp_path, "changing", python={"dependencies": ["tinypkg"]})
    assert await snapshots.build("changing") == before


async def test_the_whole_log_of_a_failed_build_is_kept(market: Market, tmp_path: Path) -> None:
    template(tmp_path, "failing", python={"dependencies": ["brittle"]})
    with pytest.raises(PackageRefused) as caught:
        await opened(tmp_path, market).build("failing")
    log = tmp_path / "snapshots/failing/failed.log"
    assert str(log) in (caught.value.hint or "")
    assert "RuntimeError: the oven is cold" in log.read_text()


@pytest.mark.parametrize("kind", ["python", "nodejs"])
@pytest.mark.parametrize("how", ["closed", "unreachable"])
async def test_an_index_that_is_away_is_told_as_such(kind: str, how: str, market: Market, tmp_path: Path) -> None:
    if kind == "nodejs":
        need_node()
    template(tmp_path, "away", **{kind: {"dependencies": ["tinypkg"]}})
    market.closed = how == "closed"
    snapshots = opened(tmp_path, market)
    if how == "unreachable":
        from skep.workspace.snapshot.indexes import Indexes

        nobody = {HOST: "127.0.0.1:1"}
        snapshots.indexes = Indexes(market.python_index, market.node_registry, nobody)
    with pytest.raises(Unavailable, match="does not answer"):
        await snapshots.build("away")
    assert shelf_names(tmp_path, "away") == set()


async def test_an_altered_file_is_not_installed(market: Market, tmp_path: Path) -> None:
    """The index serves another wheel than the one whose hash it announced."""
    from tests.workspace.market import wheel

    template(tmp_path, "altered", python={"dependencies": ["tinypkg"]})
    market.altered["tinypkg-1.0-py3-none-any.whl"] = wheel("tinypkg", "1.0", {"tinypkg.py": "ANSWER = 666\n"})
    with pytest.raises(PackageRefused, match=r"tinypkg==1\.0 is not what the index announced"):
        await opened(tmp_path, market).build("altered")


async def test_an_index_that_announces_no_hashes_will_do(market: Market, tmp_path: Path) -> None:
    template(tmp_path, "bare", python={"dependencies": ["pear"]})
    market.hashes = False
    built = await opened(tmp_path, market).build("bare")
    assert set(built.python_packages) == {"apple", "pear"}


async def test_a_build_that_meets_its_disk_limit_is_storage_full(market: Market, tmp_path: Path) -> None:
    from dataclasses import replace

    template(tmp_path, "large", python={"dependencies": ["hoard"]})
    limits = replace(LIMITS, disk_bytes=24 * MIB)
    with pytest.raises(StorageFull, match="no room"):
        await opened(tmp_path, market, limits=limits).build("large")
    assert shelf_names(tmp_path, "large") == set()
    built = await opened(tmp_path, market).build("large")
    assert built.size_bytes > 64 * MIB


async def test_a_build_that_never_ends_meets_the_time_limit(market: Market, tmp_path: Path) -> None:
    from dataclasses import replace

    template(tmp_path, "endless", python={"dependencies": ["endless"]})
    limits = replace(LIMITS, command_s=3.0)
    with pytest.raises(LimitReached, match="time"):
        await opened(tmp_path, market, limits=limits).build("endless")
    assert shelf_names(tmp_path, "endless") == set()


async def test_a_build_reaches_the_indexes_and_nothing_else(market: Market, tmp_path: Path) -> None:
    """The package's own build tries another name that leads to the same server: only the allow-list is in its way."""
    template(tmp_path, "curious", python={"dependencies": ["curious"]})
    snapshots = opened(tmp_path, market)
    with pytest.raises(PackageRefused, match="cannot be built"):
        await snapshots.build("curious")
    assert not [path for path in market.asked if "taken" in path]
    from skep.workspace.snapshot.indexes import Indexes

    pinned = {**market.upstreams, "elsewhere.test": market.upstreams[HOST]}
    snapshots.indexes = Indexes(market.python_index, market.node_registry, pinned)
    await snapshots.build("curious")
    assert [path for path in market.asked if "taken" in path]
