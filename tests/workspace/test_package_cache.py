"""Packages are fetched once for everybody, by a sandbox that runs nothing of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.workspace.market import HOST, Market, running_market
from tests.workspace.workbench import contents, indexes, need_node, opened, template

from skep.errors import InvalidRequest, PackageRefused, Unavailable
from skep.sandbox.layering import layering
from skep.sandbox.sandbox import Sandbox
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.installer import Journal
from skep.workspace.snapshot.package_cache import PackageCache, fetch, trial


@pytest.fixture
def market() -> Iterator[Market]:
    with running_market() as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> PackageCache:
    return PackageCache(tmp_path / "packages")


def downloads(market: Market) -> list[str]:
    return [path for path in market.asked if path.startswith("/files/") or "/-/" in path]


async def test_what_was_fetched_is_installed_without_the_index(market: Market, cache: PackageCache) -> None:
    need_node()
    if layering() == "none":
        pytest.skip("this kernel has no overlays, so the cache is not shared")
    chosen = await fetch(cache, indexes(market), python=["pear"], node=["@orchard/apple@^1"])
    assert chosen.python_packages == {"apple": "1.0", "pear": "1.0"}
    assert chosen.node_packages == {"@orchard/apple": "1.0.0"}
    market.closed = True
    async with trial(cache, indexes(market), journal=Journal()) as installer:
        await installer.install_python(chosen.python, "/usr/bin/python3", flags=["--target", "/workspace/lib"])
        ran = await installer.sandbox.run("PYTHONPATH=lib python3 -c 'import apple; print(apple.VERSION)'")
        assert ran.text == "1.0\n"
        from skep.workspace.snapshot.installer import package_json
        from skep.workspace.snapshot.toolchain import Node

        await installer.sandbox.files.write("package.json", package_json(["@orchard/apple@^1"]))
        await installer.sandbox.files.write("package-lock.json", chosen.node_lock)
        await installer.install_node(["@orchard/apple"], Node(None))
        assert (await installer.sandbox.run("node -p 'require(\"@orchard/apple\")'")).text == "42\n"


async def test_a_second_template_downloads_nothing_that_the_first_has(market: Market, tmp_path: Path) -> None:
    template(tmp_path, "one", python={"dependencies": ["apple<2", "tinypkg"]})
    template(tmp_path, "two", python={"dependencies": ["tinypkg", "pear"]})
    snapshots = opened(tmp_path, market)
    await snapshots.build("one")
    market.asked.clear()
    await snapshots.build("two")
    assert {path.rpartition("/")[2] for path in downloads(market)} == {"pear-1.0-py3-none-any.whl"}


async def test_a_fetch_keeps_no_source_and_runs_nothing_of_a_package(market: Market, cache: PackageCache) -> None:
    """The source would fail if it were built, and the script would fail if it were run."""
    need_node()
    chosen = await fetch(cache, indexes(market), python=["brittle", "tinypkg"], node=["brittle"])
    assert chosen.python_packages == {"brittle": "1.0", "tinypkg": "1.0"}
    kept = contents(cache.store / "uv")
    assert [path for path in kept if path.endswith("/tinypkg.py")]
    assert not [path for path in kept if path.endswith("backend.py")]


async def test_what_is_written_through_the_view_is_thrown_away(market: Market, cache: PackageCache) -> None:
    if layering() == "none":
        pytest.skip("this kernel has no overlays, so there is no view")
    await fetch(cache, indexes(market), python=["tinypkg"])
    before = contents(cache.store)
    async with trial(cache, indexes(market), journal=Journal()) as installer:
        ran = await installer.sandbox.run(f"cd {installer.at} && echo x > new && rm -rf uv && ls")
        assert ran.text == "new\n"
    assert contents(cache.store) == before


async def test_two_fetches_at_once_do_not_disturb_each_other(market: Market, cache: PackageCache) -> None:
    names = ["pear", "plum", "tinypkg", "chestnut"]
    chosen = await asyncio.gather(*(fetch(cache, indexes(market), python=[name]) for name in names))
    assert [name in one.python_packages for name, one in zip(names, chosen, strict=True)] == [True] * 4
    kept = contents(cache.store / "uv")
    for module in ("pear.py", "plum.py", "tinypkg.py", "chestnut/core.so"):
        assert [path for path in kept if path.endswith(f"/{module}")], module


async def test_without_overlays_packages_are_downloaded_again_and_builds_work(market: Market, tmp_path: Path) -> None:
    need_node()
    template(tmp_path, "plain", python={"dependencies": ["pear", "sourced"]}, nodejs={"dependencies": ["scripted"]})
    snapshots = opened(tmp_path, market)
    snapshots.cache = PackageCache(tmp_path / "packages", layering="none")
    built = await snapshots.build("plain")
    assert set(built.python_packages) == {"apple", "pear", "sourced"}
    assert (built.tree / "node_modules/scripted/built.txt").read_text() == "built\n"
    assert not (built.tree / ".build").exists()


async def test_pruning_removes_what_killed_fetches_left_and_keeps_the_packages(
    market: Market, cache: PackageCache
) -> None:
    await cache.prune()  # nothing is there yet
    await fetch(cache, indexes(market), python=["tinypkg"])
    left = cache.store / "uv" / ".tmpAbCdEf"
    async with Sandbox.create(cache.store) as sandbox:
        assert (await sandbox.run(f"mkdir uv/{left.name} && echo half > uv/{left.name}/half")).ok
    await cache.prune()
    assert not left.exists()
    market.asked.clear()
    await fetch(cache, indexes(market), python=["tinypkg"])
    assert not downloads(market)


async def test_nobody_prunes_while_somebody_fetches(market: Market, cache: PackageCache) -> None:
    market.held = "/files/"
    fetching = asyncio.create_task(fetch(cache, indexes(market), python=["tinypkg"]))
    assert await asyncio.to_thread(market.waiting.wait, 30)
    pruning = asyncio.create_task(cache.prune())
    done, _ = await asyncio.wait({pruning}, timeout=0.5)
    assert not done
    market.gate.set()
    assert (await fetching).python_packages == {"tinypkg": "1.0"}
    await pruning


async def test_nothing_is_fetched_when_it_turns_out_not_to_be_needed(market: Market, cache: PackageCache) -> None:
    need_node()
    await fetch(cache, indexes(market), node=["tinypkg"], needed=lambda chosen: "tinypkg" not in chosen.node_packages)
    assert not downloads(market)


async def test_a_package_that_cannot_be_had_is_told_and_the_cache_still_serves(
    market: Market, cache: PackageCache
) -> None:
    with pytest.raises(PackageRefused, match="no package no-such-thing"):
        await fetch(cache, indexes(market), python=["no-such-thing"])
    market.closed = True
    with pytest.raises(Unavailable):
        await fetch(cache, indexes(market), python=["tinypkg"])
    market.closed = False
    assert (await fetch(cache, indexes(market), python=["tinypkg"])).python_packages == {"tinypkg": "1.0"}


@pytest.mark.parametrize(
    "url", ["ftp://index.test/", "index.test", "https://", "https://me:secret@index.test/", "https://[::1", "file:///x"]
)
def test_an_index_that_cannot_be_used_is_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Indexes(python_index=url)
    assert "secret" not in caught.value.message


def test_only_the_named_indexes_are_allowed() -> None:
    policy = Indexes(f"http://{HOST}:8080/simple/", "https://npm.test/").network().policy
    assert {str(rule) for rule in policy.rules} == {f"{HOST}:8080", "npm.test"}
    assert Indexes().network().policy == Indexes(upstreams={}).network().policy
    assert len(Indexes().network().policy.rules) == 3
