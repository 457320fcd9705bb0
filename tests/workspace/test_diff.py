"""A diff says what changed in the words of a person: files, sizes, lines, moves and packages."""

from __future__ import annotations

import pytest

from skep.errors import NotFound
from skep.workspace.diff import Diff
from skep.workspace.workspaces import Workspaces


async def changed_by(workspaces: Workspaces, before: str, after: str) -> Diff:
    """Return the diff from a checkpoint after some commands to now, after some more."""
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run(before)).ok
        kept = await workspace.checkpoint()
        ran = await sandbox.run(after)
        assert ran.ok, ran.error_text
        diff = await workspace.diff(kept.id)
        later = await workspace.checkpoint()
        assert await workspace.diff(kept.id, later.id) == diff, "two checkpoints differ as one does from now"
        assert (await workspace.diff(later.id)).empty
        return diff


def verbs(diff: Diff) -> dict[str, str]:
    return {change.path: change.verb for change in diff.files}


async def test_files_are_named_with_what_happened_to_them(workspaces: Workspaces) -> None:
    diff = await changed_by(
        workspaces,
        "echo one > stays; echo one > changes; echo one > goes; mkdir empty full; echo x > full/x",
        "echo two >> changes; rm goes; echo new > new; rm -r full empty; mkdir -p fresh/inner deep; echo y > deep/y",
    )
    assert verbs(diff) == {
        "changes": "changed", "goes": "removed", "new": "added", "full/x": "removed", "empty": "removed",
        "fresh/inner": "added", "deep/y": "added",
    }  # fmt: skip
    text = diff.text()
    assert "~ changes  (4 B -> 8 B)\n    @@ -1 +1,2 @@\n     one\n    +two\n" in text
    assert "+ new  (4 B)" in text
    assert "+ fresh/inner/" in text
    assert text.endswith("3 added, 1 changed, 3 removed\n")


async def test_a_text_is_shown_line_by_line_and_the_rest_is_named(workspaces: Workspaces) -> None:
    diff = await changed_by(
        workspaces,
        "seq 100 > text; printf '\\000\\001' > binary; head -c 200000 /dev/zero | tr '\\0' a > large",
        "sed -i s/^50$/fifty/ text; printf '\\000\\002' > binary; echo b >> large; printf '\\033[2J evil' > escape",
    )
    changes = {change.path: change for change in diff.files}
    assert changes["text"].lines == "@@ -48,5 +48,5 @@\n 48\n 49\n-50\n+fifty\n 51\n 52"
    assert changes["binary"].binary and changes["binary"].lines is None
    assert changes["large"].lines is None and not changes["large"].binary
    assert "~ binary  (2 B, binary)" in diff.text()
    assert "\x1b" not in diff.text()


async def test_a_moved_file_is_recognised_by_its_content(workspaces: Workspaces) -> None:
    diff = await changed_by(
        workspaces,
        "mkdir old; seq 1000 > old/data; echo same > one; echo same > two",
        "mkdir new; mv old/data new/data.txt; rmdir old; mv one three; echo other > new/other",
    )
    moves = {change.was: change.path for change in diff.files if change.verb == "moved"}
    assert moves == {"old/data": "new/data.txt", "one": "three"}
    assert verbs(diff) == {"new/data.txt": "moved", "three": "moved", "new/other": "added"}
    assert "> old/data -> new/data.txt  (3.9 kB)" in diff.text()


async def test_modes_and_links_count(workspaces: Workspaces) -> None:
    diff = await changed_by(
        workspaces,
        "echo x > script; ln -s one link; echo y > real",
        "chmod 755 script; ln -sfn two link; ln -sf x real",
    )
    changes = {change.path: change for change in diff.files}
    assert changes["script"].modes == (0o644, 0o755)
    assert changes["link"].lines == "@@ -1 +1 @@\n-one\n+two"
    assert changes["real"].kind == "link"
    assert "~ script  (2 B, mode 644 -> 755)" in diff.text()


SITE = ".venv/lib/python3.11/site-packages"


async def test_environments_are_summed_up_as_packages(workspaces: Workspaces) -> None:
    diff = await changed_by(
        workspaces,
        f"mkdir -p {SITE}/My_Lib-0.9.dist-info node_modules/@scope/pkg; "
        'echo \'{"version": "1.0.0"}\' > node_modules/@scope/pkg/package.json',
        f"mv {SITE}/tiny-1.0.dist-info {SITE}/tiny-1.1.dist-info; echo 2 > {SITE}/tiny/__init__.py; "
        f"rmdir {SITE}/My_Lib-0.9.dist-info; mkdir -p {SITE}/new-3.0.dist-info; rm -r node_modules/small; "
        'echo \'{"version": "1.1.0"}\' > node_modules/@scope/pkg/package.json; echo mine > mine',
    )
    assert verbs(diff) == {"mine": "added"}
    assert [package.text() for package in diff.packages] == [
        "~ node package @scope/pkg 1.0.0 -> 1.1.0",
        "- node package small 2.0.0",
        "- python package my-lib 0.9",
        "+ python package new 3.0",
        "~ python package tiny 1.0 -> 1.1",
    ]
    assert diff.text().endswith("1 added, 5 packages\n")


async def test_a_damaged_environment_without_a_package_change_is_said(workspaces: Workspaces) -> None:
    diff = await changed_by(workspaces, "true", f"echo broken > {SITE}/tiny/__init__.py")
    assert diff.packages == () and diff.environment_files == 1
    assert "1 files of the environment have changed, but no package" in diff.text()


async def test_the_start_is_what_the_snapshot_holds(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("echo mine > note; rm pyproject.toml")).ok
    await workspaces.checkpoint("hv-one")
    assert verbs(await workspaces.diff("hv-one")) == {
        "attachments": "added", "hive": "added", "note": "added", "output/display": "added", "pyproject.toml": "removed"
    }  # fmt: skip
    with pytest.raises(NotFound):
        await workspaces.diff("hv-one", "nowhere")


async def test_two_branches_are_compared_with_each_other(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        await (await workspace.sandbox()).run("echo base > base; echo base > gone")
        base = await workspace.checkpoint()
        await (await workspace.sandbox()).run("echo left > left; rm gone")
        left = await workspace.checkpoint()
        await workspace.rollback(base.id)
        await (await workspace.sandbox()).run("echo right > right; echo other > base")
        assert verbs(await workspace.diff(left.id)) == {
            "base": "changed", "gone": "added", "left": "removed", "right": "added"
        }  # fmt: skip


async def test_names_that_are_no_text_and_links_that_lead_out_are_shown_and_not_followed(
    workspaces: Workspaces,
) -> None:
    diff = await changed_by(
        workspaces,
        "true",
        "touch \"$(printf 'odd\\nname')\" \"$(printf 'bad\\377')\"; ln -s /etc/shadow leak; ln -s /etc folder",
    )
    assert {"odd\\nname", "bad\\xff", "leak", "folder"} == verbs(diff).keys()
    assert "root:" not in diff.text()
