"""An examination names what is wrong with a workspace and how to put it right, and changes nothing."""

from __future__ import annotations

import os
import re

import pytest
from tests.workspace.orchard import Orchard, said
from tests.workspace.tree_hash import tree_hash
from tests.workspace.ways import USUAL, WAYS

from skep.errors import NotFound
from skep.sandbox.limits import MIB, Limits
from skep.workspace.grounds import Layering
from skep.workspace.health.finding import Finding, Report
from skep.workspace.health.health import examine
from skep.workspace.manifest import MARK, NAME


@pytest.fixture
def layering() -> Layering:
    """Give the machine's own way to put workspaces together: what is looked at is the same in all."""
    return USUAL


def broken(report: Report) -> dict[str, str]:
    return {finding.code: finding.message for finding in report.findings if finding.severity == "broken"}


def warnings(report: Report) -> dict[str, str]:
    return {finding.code: finding.message for finding in report.findings if finding.severity == "warning"}


@pytest.mark.parametrize("layering", WAYS)
async def test_nothing_is_wrong_with_a_healthy_workspace(orchard: Orchard, layering: Layering) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.ripe(workspaces)
    for thorough in (False, True):
        report = await examine(workspaces, workspace_id, thorough=thorough)
        assert report.ok
        assert report.troubles == ()
        assert {finding.code for finding in report.findings} == {
            "manifest", "layers", "room", "owners", "mount", "python", "packages", "modules"
        }  # fmt: skip


DAMAGES = {
    "rm -rf .venv": {"python": "does not run"},
    "rm .venv/bin/python": {"python": "does not run"},
    "ln -sf /bin/false .venv/bin/python": {"python": "does not run: it ended with 1"},
    "rm .venv/pyvenv.cfg": {"packages": "pear is not installed"},
    "rm -r .venv/lib/python3*/site-packages/tinypkg*": {"packages": "tinypkg is not installed"},
    "rm -r .venv/lib/python3*/site-packages/apple*": {"packages": "apple is not installed, and pear needs it"},
    "rm .venv/lib/python3*/site-packages/tinypkg.py": {"packages": "tinypkg has 1 files .* tinypkg.py among them"},
    "echo >> .venv/lib/python3*/site-packages/apple/__init__.py": {"packages": "apple has 1 files"},
    "rm .venv/lib/python3*/site-packages/pear-*/RECORD": {"packages": "pear has 1 files"},
    "rm -rf node_modules": {"modules": "tinypkg is not installed: node_modules is gone"},
    "rm -r node_modules/pear": {"modules": "pear is not installed"},
    "rm -r node_modules/@orchard": {"modules": "@orchard/apple is not installed"},
    "rm node_modules/pear/package.json": {"modules": "pear is not installed: its package.json is missing"},
    "echo '{' > node_modules/pear/package.json": {"modules": "pear has a package.json that cannot be read"},
    "rm node_modules/pear/index.js": {"modules": "pear lacks the file that it begins with"},
    "echo '[project' > pyproject.toml": {"declared": "pyproject.toml cannot be read: it is half-written"},
    "echo '[project]\ndependencies = 3' > pyproject.toml": {"declared": "dependencies is not a list"},
    "head -c 20 package.json > p; mv p package.json": {"declared": "package.json cannot be read: it is half-written"},
    "echo '[]' > package-lock.json": {"declared": "package-lock.json cannot be read"},
    "chmod 0 .venv": {"modes": ".venv cannot be used", "python": "does not run"},
    "chmod 0 attachments": {"modes": "attachments cannot be used"},
    "rm -rf .venv; ln -s /etc .venv": {"python": "does not run"},
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_is_named(orchard: Orchard, layering: Layering, damage: str) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.ripe(workspaces)
    async with workspaces.enter(workspace_id) as sandbox:
        await said(sandbox, damage)
    report = await examine(workspaces, workspace_id)
    assert not report.ok
    found = [finding for finding in report.findings if finding.severity == "broken"]
    assert {finding.fix for finding in found} == {f"skep workspace repair {workspace_id}"}
    for code, message in DAMAGES[damage].items():
        assert any(finding.code == code and re.search(message, finding.message) for finding in found), found


async def test_damage_that_a_checkpoint_has_kept_is_named(orchard: Orchard) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    async with workspaces.hold(workspace_id) as workspace:
        await said(await workspace.sandbox(), "rm .venv/lib/python3*/site-packages/tinypkg.py")
        await workspace.checkpoint()
    assert "tinypkg has 1 files" in broken(await examine(workspaces, workspace_id))["packages"]


SIGNS = {
    "rm pyproject.toml": ("declared", "pyproject.toml was removed"),
    "rm -r attachments output": ("layout", "attachments, output, output/display are missing"),
    "sed -i /pear/d pyproject.toml": ("record", "pear were installed and are no longer declared"),
    'sed -i \'s/"\\*"/">=2"/\' package.json': ("modules", "tinypkg is 1.0.0, and >=2 is declared"),
}


@pytest.mark.parametrize("sign", SIGNS)
async def test_what_could_be_meant_is_a_warning(orchard: Orchard, sign: str) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.ripe(workspaces)
    async with workspaces.enter(workspace_id) as sandbox:
        await said(sandbox, sign)
    report = await examine(workspaces, workspace_id)
    assert report.ok
    code, message = SIGNS[sign]
    assert message in warnings(report)[code]


async def test_a_package_that_is_declared_and_not_installed_is_broken(orchard: Orchard) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    async with workspaces.enter(workspace_id) as sandbox:
        await said(sandbox, 'sed -i \'s/"tinypkg",/"tinypkg", "apple",/\' pyproject.toml')
    assert "apple is not installed" in broken(await examine(workspaces, workspace_id))["packages"]


async def test_only_a_thorough_look_imports_packages(orchard: Orchard) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.ripe(workspaces)
    async with workspaces.enter(workspace_id) as sandbox:
        await said(
            sandbox, "cd .venv/lib/python3*/site-packages; echo import appel > pear.py; touch -d 2001-01-01 pear.py"
        )
    assert (await examine(workspaces, workspace_id)).ok
    report = await examine(workspaces, workspace_id, thorough=True)
    assert "pear cannot be imported: ModuleNotFoundError: No module named 'appel'" in broken(report)[
        "packages"
    ].replace("\\'", "'")


async def test_an_examination_changes_nothing(orchard: Orchard, layering: Layering) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.planted(workspaces)
    async with workspaces.enter(workspace_id) as sandbox:
        before = await tree_hash(sandbox)
    manifest = workspaces.show(workspace_id)
    await examine(workspaces, workspace_id, thorough=True)
    assert workspaces.show(workspace_id) == manifest
    async with workspaces.enter(workspace_id) as sandbox:
        assert await tree_hash(sandbox) == before


async def test_a_workspace_in_use_is_looked_at_where_it_is(orchard: Orchard, layering: Layering) -> None:
    async with orchard.workspace(layering) as workspace:
        job = await (await workspace.sandbox()).background("sleep 100")
        report = await examine(orchard.workspaces(layering), workspace.id)
        assert report.troubles == ()
        assert job.running


async def test_a_suspended_workspace_stays_so(orchard: Orchard) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    await workspaces.suspend(workspace_id)
    report = await examine(workspaces, workspace_id)
    assert report.ok
    assert "suspended" in next(finding.message for finding in report.findings if finding.code == "mount")
    assert workspaces.show(workspace_id).suspended


async def test_a_missing_mark_is_named(orchard: Orchard) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    (workspaces.register.path(workspace_id) / MARK).unlink()
    report = await examine(workspaces, workspace_id)
    assert broken(report) == {"mark": f"the mark of a finished workspace, {MARK}, is missing"}
    (workspaces.register.path(workspace_id) / MARK).touch()


async def test_a_workspace_that_was_never_finished_is_told_from_one_that_lost_its_mark(orchard: Orchard) -> None:
    workspaces = orchard.workspaces()
    folder = orchard.home / "workspaces" / "never"
    folder.mkdir(parents=True)
    report = await examine(workspaces, "never")
    assert report.findings[-1] == Finding(
        "mark", "broken", "the workspace was never finished", "skep workspace create never"
    )
    folder.rmdir()


@pytest.mark.parametrize("text", [b"", b"{", b'{"v": 1}'])
async def test_a_half_written_manifest_is_named(orchard: Orchard, text: bytes) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    file = workspaces.register.path(workspace_id) / NAME
    whole = file.read_bytes()
    file.write_bytes(text or whole[: len(whole) // 2])
    assert set(broken(await examine(workspaces, workspace_id))) == {"manifest"}
    file.write_bytes(whole)


async def test_a_missing_folder_of_files_is_named(orchard: Orchard, layering: Layering) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.planted(workspaces)
    tree = workspaces.trees.tree(workspaces.show(workspace_id).upper)
    tree.rename(tree.with_name("elsewhere"))
    report = await examine(workspaces, workspace_id)
    assert str(tree) in broken(report)["layers"]
    tree.with_name("elsewhere").rename(tree)


async def test_a_missing_snapshot_is_named(orchard: Orchard) -> None:
    workspaces = orchard.workspaces("overlay")
    workspace_id = await orchard.planted(workspaces)
    snapshot = orchard.snapshots.latest("orchard").folder
    snapshot.rename(snapshot.with_name("elsewhere"))
    try:
        assert "snapshot is missing" in broken(await examine(workspaces, workspace_id))["snapshot"]
    finally:
        snapshot.with_name("elsewhere").rename(snapshot)


async def test_a_workspace_that_is_nowhere_is_not_found(orchard: Orchard) -> None:
    with pytest.raises(NotFound):
        await examine(orchard.workspaces(), "nowhere")


@pytest.mark.parametrize(("taken_mb", "severity"), [(10, "ok"), (19, "warning"), (21, "broken")])
async def test_room_that_runs_out_is_told_before_and_after(orchard: Orchard, taken_mb: int, severity: str) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    async with workspaces.enter(workspace_id) as sandbox:
        await said(sandbox, f"head -c {taken_mb}M /dev/urandom > taken")
    report = await examine(orchard.workspaces(limits=Limits(disk_bytes=20 * MIB)), workspace_id)
    assert next(finding.severity for finding in report.findings if finding.code == "room") == severity


async def test_files_of_another_user_are_named(orchard: Orchard) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    tree = workspaces.trees.tree(workspaces.show(workspace_id).upper)
    os.chown(tree / "src" / "deep", 0, 0)
    assert "src/deep belong to another user" in broken(await examine(workspaces, workspace_id))["owners"]


async def test_what_an_impostor_says_in_the_interpreters_place_is_shown_plainly(orchard: Orchard) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    answer = r'{"version": "3.\u001b[2J", "missing": {"\u001b]0;x\u0007": ""}, "damaged": {}}'
    async with workspaces.enter(workspace_id) as sandbox:
        await said(sandbox, "rm .venv/bin/python")
        await sandbox.files.write(".venv/bin/python", f"#!/bin/sh\necho '{answer}'\n", mode=0o755)
    report = await examine(workspaces, workspace_id)
    assert not report.ok
    assert all(finding.message.isprintable() for finding in report.findings)


async def test_a_flood_in_the_interpreters_place_is_cut_off(orchard: Orchard) -> None:
    workspaces = orchard.workspaces(limits=Limits(output_bytes=1 << 16))
    workspace_id = await orchard.planted(workspaces)
    async with workspaces.enter(workspace_id) as sandbox:
        await said(sandbox, "rm .venv/bin/python")
        await sandbox.files.write(".venv/bin/python", "#!/bin/sh\nyes | head -c 10000000\n", mode=0o755)
    assert "does not answer as Python does" in broken(await examine(workspaces, workspace_id))["python"]


def test_a_report_is_well_when_nothing_in_it_is_broken() -> None:
    fine, doubtful = Finding("a", "ok", "."), Finding("b", "warning", ".", "fix")
    assert Report("w", (fine, doubtful)).ok
    assert Report("w", (fine, doubtful)).troubles == (doubtful,)
    assert not Report("w", (fine, Finding("c", "broken", "."))).ok
