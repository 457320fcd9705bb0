"""Nobody poisons the packages that others will get: neither a package while it is built, nor a workspace.

Each control does the same with the cache, or the snapshot, bound so that it can be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.workspace.market import Market, running_market, source
from tests.workspace.workbench import contents, indexes, need_node, opened, template

from skep.sandbox.layering import layering
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount, Stack
from skep.workspace.snapshot.package_cache import VIEW, PackageCache, fetch
from skep.workspace.snapshot.snapshot import Snapshot
from skep.workspace.snapshot.snapshots import Snapshots

#: Rewrites a package of somebody else's wherever the cache keeps it.
_POISON = """
import os, pathlib
for found in pathlib.Path(os.environ.get("UV_CACHE_DIR", "/opt/skep/packages/uv")).rglob("tinypkg.py"):
    found.unlink()
    found.write_text("ANSWER = 666\\n")
"""
#: The same for npm, which checks what it takes from the cache: here it is enough that something was changed.
_NPM_POISON = "find $npm_config_cache -type f -exec sh -c 'echo poison > $0' {} \\;"


class OpenCache(PackageCache):
    """A cache that whoever sees it can write."""

    async def view(self) -> tuple[Mount, ...]:
        self.store.mkdir(parents=True, exist_ok=True)
        return (Mount(str(self.store), VIEW, "read-write"),)


@pytest.fixture(autouse=True)
def _overlays() -> None:
    if layering() == "none":
        pytest.skip("this kernel has no overlays, so no cache is shared: see test_package_cache of workspaces")


@pytest.fixture
def market() -> Iterator[Market]:
    with running_market() as running:
        running.python["poison"] = {"poison-1.0.tar.gz": source("poison", "1.0", _POISON)}
        yield running


@pytest.fixture(params=["shared", "control"])
def target(request: pytest.FixtureRequest, market: Market, tmp_path: Path) -> Target:
    snapshots = opened(tmp_path, market)
    if request.param == "control":
        snapshots.cache = OpenCache(tmp_path / "packages")
    return Target(snapshots, tmp_path, succeeds=request.param == "control")


@dataclass(frozen=True, slots=True)
class Target:
    """Snapshots whose cache is attacked, and whether the attack is bound to succeed."""

    snapshots: Snapshots
    home: Path
    succeeds: bool

    async def answer(self) -> str:
        """Build a template of somebody else's, and say what its package answers."""
        built = await self.snapshots.build("victim", fresh=True)
        (module,) = built.tree.rglob("tinypkg.py")
        return module.read_text()


async def test_a_package_that_is_built_cannot_change_another_in_the_cache(target: Target) -> None:
    template(target.home, "victim", python={"dependencies": ["tinypkg"]})
    template(target.home, "evil", python={"dependencies": ["poison"]})
    assert await target.answer() == "ANSWER = 42\n"
    before = contents(target.home / "packages/cache/uv/archive-v0")
    await target.snapshots.build("evil")
    changed = contents(target.home / "packages/cache/uv/archive-v0") != before
    assert (changed, await target.answer()) == (target.succeeds, f"ANSWER = {666 if target.succeeds else 42}\n")


async def test_a_script_of_a_node_package_cannot_change_the_cache(target: Target, market: Market) -> None:
    need_node()
    from tests.workspace.market import packed

    manifest = f'{{"name": "poison", "version": "1.0.0", "scripts": {{"install": {_quoted(_NPM_POISON)}}}}}'
    market.node["poison"] = {"1.0.0": packed({"package.json": manifest}, below="package")}
    template(target.home, "victim", nodejs={"dependencies": ["tinypkg"]})
    template(target.home, "evil", nodejs={"dependencies": ["poison"]})
    await target.snapshots.build("victim")
    stored = target.home / "packages/cache/npm/_cacache/content-v2"
    before = contents(stored)
    await target.snapshots.build("evil")
    after = contents(stored)
    assert {path: after.get(path) for path in before} == before or target.succeeds
    assert any(data == b"poison\n" for data in after.values()) == target.succeeds


async def test_a_workspace_cannot_change_the_cache(target: Target, market: Market) -> None:
    template(target.home, "victim", python={"dependencies": ["tinypkg"]})
    await fetch(target.snapshots.cache, indexes(market), python=["tinypkg"])
    async with Sandbox.create(mounts=await target.snapshots.cache.view()) as sandbox:
        ran = await sandbox.run(["python3", "-c", _POISON])
        assert ran.ok, ran.error_text
        seen = await sandbox.run(f"cat $(find {VIEW} -name tinypkg.py)")
        assert seen.text == "ANSWER = 666\n"  # the attack did what it meant to, in its own eyes
    assert await target.answer() == f"ANSWER = {666 if target.succeeds else 42}\n"


async def test_a_workspace_cannot_plant_a_link_that_the_next_fetch_follows(target: Target, market: Market) -> None:
    """The folder that archives are unpacked to becomes a link to elsewhere."""
    await fetch(target.snapshots.cache, indexes(market), python=["tinypkg"])
    async with Sandbox.create(mounts=await target.snapshots.cache.view()) as sandbox:
        plant = f"rm -rf {VIEW}/uv/archive-v0 && ln -s /cache/elsewhere {VIEW}/uv/archive-v0"
        assert (await sandbox.run(plant)).ok
    planted = (target.home / "packages/cache/uv/archive-v0").is_symlink()
    assert planted == target.succeeds


@pytest.mark.parametrize("bound", [False, True], ids=["layer", "control"])
async def test_a_workspace_cannot_change_the_snapshot_below_it(bound: bool, market: Market, tmp_path: Path) -> None:
    template(tmp_path, "victim", python={"dependencies": ["tinypkg"]})
    built = await opened(tmp_path, market).build("victim")
    before = contents(built.tree)
    async with _over(built, tmp_path / "over", bound=bound) as sandbox:
        poison = "echo 'ANSWER = 666' > $(find .venv -name tinypkg.py) && rm pyproject.toml && touch planted"
        assert (await sandbox.run(poison)).ok
        assert (await sandbox.run("python -c 'import tinypkg; print(tinypkg.ANSWER)'")).text == "666\n"
    assert (contents(built.tree) != before) == bound


def _over(built: Snapshot, folder: Path, *, bound: bool) -> Sandbox:
    if bound:
        return Sandbox.create(built.tree)  # type: ignore[return-value]
    for name in ("upper", "work"):
        (folder / name).mkdir(parents=True)
    stack = Stack(str(folder / "upper"), str(folder / "work"), (str(built.tree),))
    return Sandbox.create(stack=stack)  # type: ignore[return-value]


def _quoted(text: str) -> str:
    import json

    return json.dumps(text)
