"""What packages bring, and what an agent plants in the way of an install, reaches nothing that is not theirs."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uv
from tests.workspace.market import packed, source
from tests.workspace.orchard import Orchard, growing, said
from tests.workspace.workbench import need_node

from skep.errors import InvalidRequest, PackageRefused
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount
from skep.workspace.packages.environment import Environment
from skep.workspace.packages.view import View

SPY = "raise RuntimeError('saw ' + ' '.join(sorted(os.listdir('/workspace'))))"
VANDAL = "open('/workspace/note', 'w').write('not yours any more')"


@pytest.fixture(scope="module")
def orchard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchard]:
    need_node()
    with growing(tmp_path_factory.mktemp("orchard")) as made:
        made.market.python["spy"] = {"spy-1.0.tar.gz": source("spy", "1.0", SPY)}
        made.market.python["vandal"] = {"vandal-1.0.tar.gz": source("vandal", "1.0", VANDAL)}
        script = {"postinstall": "echo not yours any more > /workspace/note"}
        manifest = json.dumps({"name": "vandal", "version": "1.0.0", "scripts": script})
        files = {"package.json": manifest, "index.js": "module.exports = 42\n"}
        made.market.node["vandal"] = {"1.0.0": packed(files, below="package")}
        yield made


@asynccontextmanager
async def unprotected(orchard: Orchard) -> AsyncIterator[Sandbox]:
    """Give the workspace itself to the installers, as an agent would that could reach the package index."""
    workspaces = orchard.workspaces()
    tools = Mount(str(Path(uv.find_uv_bin()).parent), "/opt/tools")
    network = orchard.snapshots.indexes.network()
    workspace_id = await orchard.planted(workspaces)
    async with workspaces.enter(workspace_id, network=network, mounts=[tools]) as sandbox:
        yield sandbox


def uv_install(orchard: Orchard, package: str) -> str:
    index = orchard.market.python_index
    return f"UV_CACHE_DIR=/tmp/uv /opt/tools/uv pip install --python .venv --default-index {index} {package}"


async def test_the_build_of_a_package_sees_nothing_of_the_agents(orchard: Orchard) -> None:
    async with unprotected(orchard) as sandbox:
        control = await sandbox.run(uv_install(orchard, "spy"))
        assert "saw .config" in control.error_text
    async with orchard.workspace() as workspace:
        with pytest.raises(PackageRefused, match="saw") as raised:
            await orchard.install(workspace, python=["spy"])
    seen = raised.value.message.rpartition("saw ")[2].split()
    assert set(seen) <= {".venv", "node_modules", "pyproject.toml", "package.json", "package-lock.json"}


async def test_the_build_of_a_package_cannot_change_the_agents_files(orchard: Orchard) -> None:
    async with unprotected(orchard) as sandbox:
        await said(sandbox, uv_install(orchard, "vandal"))
        assert await said(sandbox, "cat note") == "not yours any more"
    async with orchard.workspace() as workspace:
        await orchard.install(workspace, python=["vandal"])
        sandbox = await workspace.sandbox()
        assert await said(sandbox, "cat note; python -c 'import vandal'") == "mine\n"


async def test_the_script_of_a_package_cannot_change_the_agents_files(orchard: Orchard) -> None:
    async with unprotected(orchard) as sandbox:
        await said(sandbox, f"npm install --registry {orchard.market.node_registry} vandal")
        assert await said(sandbox, "cat note") == "not yours any more\n"
    async with orchard.workspace() as workspace:
        await orchard.install(workspace, node=["vandal"])
        assert await said(await workspace.sandbox(), "cat note; node -p 'require(\"vandal\")'") == "mine\n42\n"


@pytest.mark.parametrize("layering", ["overlay", "copy"])
async def test_a_link_in_the_place_of_pyproject_shows_nothing_of_the_host_and_changes_nothing_there(
    orchard: Orchard, outside: Path, layering: str
) -> None:
    secret = outside / "pyproject.toml"
    secret.write_text('[project]\nname = "secret"\nversion = "1"\ndependencies = ["apple"]\n')
    before = secret.read_bytes()
    async with orchard.workspace(layering) as workspace:  # type: ignore[arg-type]
        sandbox = await workspace.sandbox()
        await said(sandbox, f"rm pyproject.toml; ln -s {secret} pyproject.toml")
        upper = Path(workspace.grounds.stack(workspace.manifest).upper)
        assert (upper / "pyproject.toml").read_bytes() == before, "the control is held"
        await orchard.install(workspace, python=["sourced"])
        assert "secret" not in await said(sandbox, "cat pyproject.toml")
        assert secret.read_bytes() == before


@pytest.mark.parametrize("link", [".venv", ".venv/lib"])
async def test_a_link_in_the_place_of_the_environment_brings_nothing_of_the_host_inside(
    orchard: Orchard, outside: Path, tmp_path: Path, link: str
) -> None:
    library = outside / "lib" if link == ".venv" else outside
    site = library / "python3.11" / "site-packages"
    (site / "secret-1.0.dist-info").mkdir(parents=True)
    (site / "secret-1.0.dist-info" / "METADATA").write_text("the secret")
    async with orchard.workspace("copy") as workspace:
        await said(await workspace.sandbox(), f"rm -rf {link}; ln -s {outside} {link}")
        upper = workspace.grounds.stack(workspace.manifest).upper
        shutil.copytree(f"{upper}/.venv", tmp_path / "copied")
        copied = tmp_path / "copied" / "lib/python3.11/site-packages/secret-1.0.dist-info/METADATA"
        assert copied.read_text() == "the secret", "the control is held"
        assert Environment.read([upper]).python == {}
        with pytest.raises(InvalidRequest, match="no environment of Python"):
            await orchard.install(workspace, python=["apple"])


@pytest.mark.parametrize("place", ["../secret", "src/../../secret", "src/./../../secret", "out/secret"])
async def test_a_path_that_an_agent_makes_up_leads_out_of_no_stack(tmp_path: Path, place: str) -> None:
    (tmp_path / "layer" / "src").mkdir(parents=True)
    (tmp_path / "layer" / "out").symlink_to(tmp_path)
    (tmp_path / "secret").write_text("the secret")
    assert (tmp_path / "layer" / place).read_text() == "the secret", "the control is held"
    view = View([str(tmp_path / "layer")])
    assert view.find(place) is None
    assert view.read(place) is None


async def test_settings_of_npm_that_an_agent_plants_lead_an_install_nowhere(orchard: Orchard) -> None:
    async with orchard.workspace() as workspace:
        sandbox = await workspace.sandbox()
        await said(
            sandbox, "echo registry=http://elsewhere.test/ > .npmrc; echo '@orchard:registry=http://e.test' >> .npmrc"
        )
        assert await said(sandbox, "npm config get registry") == "http://elsewhere.test/\n", "the control is held"
        await orchard.install(workspace, node=["@orchard/apple"])
        assert await said(sandbox, "node -p 'require(\"@orchard/apple\")'") == "42\n"
        assert "elsewhere.test" not in await said(sandbox, "cat package-lock.json")


async def test_settings_of_uv_that_an_agent_plants_lead_an_install_nowhere(orchard: Orchard) -> None:
    settings = '[[tool.uv.index]]\nurl = "http://elsewhere.test/simple"\ndefault = true\n'
    async with unprotected(orchard) as sandbox:
        await sandbox.files.write("pyproject.toml", settings)
        control = await sandbox.run(
            "UV_CACHE_DIR=/tmp/uv UV_HTTP_RETRIES=0 /opt/tools/uv pip install --python .venv apple"
        )
        assert "elsewhere.test" in control.error_text
    async with orchard.workspace() as workspace:
        sandbox = await workspace.sandbox()
        await sandbox.files.write("pyproject.toml", settings)
        await sandbox.files.write("uv.toml", 'index-url = "http://elsewhere.test/simple"\n')
        await orchard.install(workspace, python=["apple"])
        await said(sandbox, "python -c 'import apple'")
