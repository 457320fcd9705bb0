"""Nothing that runs in a workspace changes what others share: snapshots, kept states, and what forks have in common.

Every attempt is also made where the shared folder is the workspace itself, without a layer above it, and gets through.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.attacks.attack import PYTHON, program
from tests.workspace.conftest import make_snapshot

from skep.sandbox.erase import erase
from skep.sandbox.layering import layering as machine_layering
from skep.sandbox.sandbox import Sandbox
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.templates import Templates
from skep.workspace.workspaces import Workspaces

#: Each changes the file or folder at `victim`, a file that others share, or dies trying.
ATTEMPTS = {
    "overwrite": "open(victim, 'r+b').write(b'POISON')",
    "append": "open(victim, 'ab').write(b'POISON')",
    "truncate": "os.truncate(victim, 1)",
    "through a hard link": "os.link(victim, 'alias'); open('alias', 'r+b').write(b'POISON')",
    "through a link": "os.symlink(os.path.abspath(victim), 'alias'); open('alias', 'r+b').write(b'POISON')",
    "through a map": """
import mmap
with open(victim, 'r+b') as file:
    mapped = mmap.mmap(file.fileno(), 0)
    mapped[:1] = b'X'
    mapped.flush()
""",
    "reopened by descriptor": """
fd = os.open(victim, os.O_RDONLY)
again = os.open(f'/proc/self/fd/{fd}', os.O_RDWR)
os.write(again, b'POISON')
""",
    "opened before it is copied up": """
reader = os.open(victim, os.O_RDONLY)
os.chmod(victim, 0o777)
again = os.open(f'/proc/self/fd/{reader}', os.O_RDWR)
os.write(again, b'POISON')
os.ftruncate(again, 2)
""",
    "replace": "open('new', 'wb').write(b'POISON'); os.rename('new', victim)",
    "remove": "os.unlink(victim)",
    "mode": "os.chmod(victim, 0o777)",
    "attribute": "os.setxattr(victim, 'user.poison', b'1')",
    "remove the folder": "import shutil; shutil.rmtree(os.path.dirname(victim) or victim)",
    "replace the folder": """
folder = os.path.dirname(victim)
os.mkdir('other')
open(os.path.join('other', os.path.basename(victim)), 'wb').write(b'POISON')
import shutil
shutil.rmtree(folder)
os.rename('other', folder)
""",
    "new file beside it": "open(os.path.join(os.path.dirname(victim), 'planted.pth'), 'w').write('import os')",
    "time": "os.utime(victim, (1, 1))",
}


def fingerprint(tree: Path) -> str:
    """Hash a folder with names, modes, times, attributes and contents."""
    digest = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        found = path.lstat()
        times = found.st_mtime_ns if stat.S_ISREG(found.st_mode) else 0
        digest.update(f"{path.relative_to(tree)}\0{found.st_mode}\0{times}\0".encode())
        digest.update(repr(sorted(os.listxattr(path, follow_symlinks=False))).encode())
        if stat.S_ISREG(found.st_mode):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    if machine_layering() == "none":
        pytest.skip("this machine refuses overlays, so nothing is shared")
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    make_snapshot(folder)
    yield folder
    erase(str(folder), folder.stat().st_ino)


@pytest.fixture
def workspaces(home: Path) -> Workspaces:
    return Workspaces(home, Snapshots(home, Templates(home / "templates")), layering="overlay")


async def carry_out(sandbox: Sandbox, attempt: str, victim: str) -> str:
    ran = await sandbox.run([PYTHON, "-c", program(attempt, victim=victim)])
    return ran.text + ran.error_text


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_no_workspace_changes_the_snapshot_below_it(name: str, home: Path, workspaces: Workspaces) -> None:
    shared = next((home / "snapshots" / "minimal").glob("v*")) / "tree"
    victim = ".venv/lib/python3.11/site-packages/tiny/__init__.py"
    await assert_control(name, shared, victim, home)
    before = fingerprint(shared)
    await workspaces.create("attacker")
    async with workspaces.enter("attacker") as sandbox:
        said = await carry_out(sandbox, ATTEMPTS[name], victim)
        assert "THROUGH" in said or "HELD" in said, said
    assert fingerprint(shared) == before
    await workspaces.create("next")
    async with workspaces.enter("next") as sandbox:
        assert (await sandbox.run(f"cat {victim}; ls .venv/lib/python3.11/site-packages/tiny")).text == (
            "VALUE = 1\n__init__.py\n"
        )


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_no_workspace_changes_what_its_checkpoints_and_forks_share(
    name: str, home: Path, workspaces: Workspaces
) -> None:
    victim = "folder/kept"
    await workspaces.create("attacker")
    async with workspaces.hold("attacker") as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run("mkdir folder; echo precious > folder/kept")).ok
        kept = await workspace.checkpoint()
        shared = workspaces.trees.tree(kept.state.layers[0])
        before = fingerprint(shared)
        await assert_control(name, shared, victim, home)
        await workspaces.fork("attacker", ["child"])
        said = await carry_out(sandbox, ATTEMPTS[name], victim)
        assert "THROUGH" in said or "HELD" in said, said
        assert fingerprint(shared) == before
        async with workspaces.enter("child") as child:
            assert (await child.run("cat folder/kept; ls folder")).text == "precious\nkept\n"
            await carry_out(child, ATTEMPTS[name], victim)
        assert fingerprint(shared) == before
        await workspace.rollback(kept.id)
        again = await workspace.sandbox()
        assert (await again.run("cat folder/kept; ls folder")).text == "precious\nkept\n"


async def assert_control(name: str, shared: Path, victim: str, home: Path) -> None:
    """Assert that the attempt changes a folder that is shared without a layer above it."""
    control = home / "control"
    shutil.copytree(shared, control, symlinks=True)
    before = fingerprint(control)
    async with Sandbox.create(control, adopt=True) as sandbox:
        said = await carry_out(sandbox, ATTEMPTS[name], victim)
    assert fingerprint(control) != before, f"the control is held, so the attempt shows nothing: {said}"
    erase(str(control), control.stat().st_ino)


MARKS = {
    "opaque": ("user.overlay.opaque", b"y"),
    "redirect": ("user.overlay.redirect", b"/../../../../etc"),
    "metacopy": ("user.overlay.metacopy", b""),
    "whiteout": ("user.overlay.whiteout", b"y"),
}


@pytest.mark.parametrize("name", MARKS)
async def test_the_overlays_own_marks_cannot_be_forged_from_inside(
    name: str, home: Path, workspaces: Workspaces
) -> None:
    """A mark set from inside does not act: the folder shows what it showed, in the next sandbox too."""
    attribute, value = MARKS[name]
    attempt = "os.setxattr('.venv/bin', attribute, value); os.setxattr('.venv/bin/tool', attribute, value)"
    await workspaces.create("attacker")
    async with workspaces.enter("attacker") as sandbox:
        assert (await sandbox.run("mkdir -p .venv/bin/mine; ls .venv/bin")).text == "mine\ntool\n"
        await sandbox.run([PYTHON, "-c", program(attempt, attribute=attribute, value=value)])
        control = home / "control"
        control.mkdir()
        (control / ".venv" / "bin").mkdir(parents=True)
        (control / ".venv" / "bin" / "tool").touch()
        async with Sandbox.create(control, adopt=True) as plain:
            said = await plain.run([PYTHON, "-c", program(attempt, attribute=attribute, value=value)])
            assert "THROUGH" in said.text, f"the control is held, so the attempt shows nothing: {said.text}"
        assert os.getxattr(control / ".venv" / "bin", attribute) == value
    for _ in range(2):
        async with workspaces.enter("attacker") as sandbox:
            assert (await sandbox.run("ls .venv/bin; tool")).text == "mine\ntool\ntool one\n"
        await workspaces.checkpoint("attacker")
