"""What an agent can plant in its workspace to lead a mount astray, or to change what lies below it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.attacks.attack import built

from skep.errors import SandboxUnusable
from skep.sandbox.agent import NETWORK
from skep.sandbox.bubblewrap import BubblewrapSandbox
from skep.sandbox.layering import layering
from skep.sandbox.recipe import Recipe
from skep.sandbox.resident import MOUNTS
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount, Stack, lay

#: What keeps `skep-mount` from following a link, and what it would do without.
FOLLOWS_LINKS = (
    ("RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH", "0"),
    ("int fd = opened(root, path + 1);", "int fd = open(path, O_PATH | O_DIRECTORY);"),
)


@pytest.fixture(autouse=True)
def layers_are_possible() -> None:
    if layering() == "none":
        pytest.skip("this kernel mounts no overlay for an ordinary user")


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    folder = tmp_path / "shown"
    folder.mkdir()
    (folder / "memory").write_text("of the hive\n")
    return folder


@pytest.fixture
def stacked(tmp_path: Path) -> Stack:
    for part in ("layer", "top/tree", "top/work"):
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "layer" / "below").write_text("of the layer\n")
    return Stack(str(tmp_path / "top" / "tree"), str(tmp_path / "top" / "work"), (str(tmp_path / "layer"),))


@asynccontextmanager
async def with_mounts_by(
    program: Path | None, stacked: Stack, mounts: Sequence[Mount]
) -> AsyncIterator[BubblewrapSandbox]:
    """Start a sandbox and show folders in it by another `skep-mount` than ours."""
    async with await BubblewrapSandbox.start_from(Recipe(stack=stacked)) as sandbox:
        namespace = await sandbox._agent.ask(NETWORK, MOUNTS)
        await lay(namespace.fd, None, mounts, owner=sandbox.launcher.owner, program=program)
        namespace.without_fd()
        yield sandbox


LINKS = {"to a folder of the system": "/etc", "to memory": "/tmp", "up and away": "../etc", "to the workspace": "."}


@pytest.mark.parametrize("target", LINKS.values(), ids=LINKS)
async def test_a_planted_link_stops_the_mount_instead_of_leading_it(stacked: Stack, shown: Path, target: str) -> None:
    async with Sandbox.create(stack=stacked) as sandbox:
        assert (await sandbox.run(["ln", "-s", target, "hive"])).ok
    with pytest.raises(SandboxUnusable, match="/workspace/hive"):
        await Sandbox.create(stack=stacked, mounts=[Mount(str(shown), "/workspace/hive")])


async def test_a_planted_link_leads_a_mount_that_follows_it(stacked: Stack, shown: Path) -> None:
    """Control: without the two protections the mount lands on the system's folder."""
    async with Sandbox.create(stack=stacked) as sandbox:
        await sandbox.run(["ln", "-s", "/etc", "hive"])
    careless = built("mount", FOLLOWS_LINKS)
    async with with_mounts_by(careless, stacked, [Mount(str(shown), "/workspace/hive")]) as sandbox:
        assert (await sandbox.run(["cat", "/etc/memory"])).text == "of the hive\n"


@pytest.mark.parametrize("plant", ["ln -s /etc a", "mkdir a; ln -s /etc a/b", "touch a", "mkfifo a"])
async def test_what_is_planted_on_the_way_stops_the_mount(stacked: Stack, shown: Path, plant: str) -> None:
    async with Sandbox.create(stack=stacked) as sandbox:
        assert (await sandbox.run(plant)).ok
    with pytest.raises(SandboxUnusable, match="/workspace/a/b"):
        await Sandbox.create(stack=stacked, mounts=[Mount(str(shown), "/workspace/a/b")])


TRICKS = {
    "write": "echo changed >hive/memory",
    "add": "echo new >hive/new",
    "remove": "rm hive/memory",
    "move the folder": "mv hive old && mkdir hive && echo changed >hive/memory",
    "change its mode": "chmod 777 hive/memory",
    "link": "ln hive/memory stolen && echo changed >stolen",
}


@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS)
@pytest.mark.parametrize("protected", [True, False], ids=["read-only", "control"])
async def test_what_is_shown_read_only_stays_as_it_is(stacked: Stack, shown: Path, trick: str, protected: bool) -> None:
    if not protected:
        (Path(stacked.layers[0]) / "hive").mkdir()
        (Path(stacked.layers[0]) / "hive" / "memory").write_text("of the hive\n")
    mounts = [Mount(str(shown), "/workspace/hive")] if protected else []
    async with Sandbox.create(stack=stacked, mounts=mounts) as sandbox:
        tried = await sandbox.run(trick)
        assert tried.ok is not protected
        assert (await sandbox.run("cat hive/memory")).text == "of the hive\n" or not protected
    assert [path.name for path in shown.iterdir()] == ["memory"]
    assert (shown / "memory").read_text() == "of the hive\n"


HIDE = "import os; os.makedirs('folder', exist_ok=True); os.setxattr('folder', 'user.overlay.opaque', b'y')"


@pytest.mark.parametrize("where", ["inside", "control"])
async def test_an_agent_cannot_mark_a_folder_as_hiding_what_is_below(stacked: Stack, where: str) -> None:
    below = Path(stacked.layers[0]) / "folder"
    below.mkdir()
    (below / "file").write_text("of the layer\n")
    async with Sandbox.create(stack=stacked) as sandbox:
        await sandbox.run("touch folder/mine")
        if where == "inside":
            await sandbox.run(["/usr/bin/python3", "-c", HIDE])
    if where == "control":
        os.setxattr(f"{stacked.upper}/folder", "user.overlay.opaque", b"y")
    async with Sandbox.create(stack=stacked) as sandbox:
        assert (await sandbox.run(["test", "-e", "folder/file"])).ok is (where == "inside")


@pytest.mark.parametrize("where", ["inside", "control"])
async def test_an_agent_cannot_make_the_mark_of_a_removed_file(stacked: Stack, where: str, tmp_path: Path) -> None:
    """A device 0:0 hides what is below; made where the kernel does not make it itself, it would be a lie."""
    make = "import os; os.mknod('mark', 0o020644, os.makedev(0, 0))"
    async with Sandbox.create(stack=stacked) if where == "inside" else Sandbox.create(tmp_path / "plain") as sandbox:
        assert (await sandbox.run(["/usr/bin/python3", "-c", make])).ok is (where == "control")
