"""skep workspace makes, keeps, copies and removes workspaces, and every act on a hive's is on record."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.workspace.archive.bucket import Bucket, serving

Ran = subprocess.CompletedProcess[str]
Cli = Callable[..., Ran]


def inside(cli: Cli, workspace: str, command: str) -> str:
    ran = cli("exec", "-H", workspace, "--", "sh", "-c", command)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def events(cli: Cli) -> list[tuple[str, dict[str, object]]]:
    """Return what is on record about the hive's workspace."""
    lines = cli("events", "list", "garden", "--json").stdout.splitlines()
    found = [(event["type"], event["body"]) for event in map(json.loads, lines)]
    return [(kind, body) for kind, body in found if kind not in ("hive_created", "session_changed")]


def id_of(cli: Cli, hive: str = "garden") -> str:
    return str(json.loads(cli("hive", "show", hive, "--json").stdout)["id"])


def workspace_of(cli: Cli, hive: str = "garden") -> str:
    return str(json.loads(cli("workspace", "show", hive, "--json").stdout)["id"])


def test_the_first_command_makes_the_workspace_and_says_what_takes_its_time(cli: Cli) -> None:
    cli("hive", "create", "garden")
    first = cli("exec", "-H", "garden", "--", "python", "-c", "import sys; print(sys.prefix)")
    assert (first.returncode, first.stdout) == (0, "/workspace/.venv\n")
    assert "building the template minimal" in first.stderr
    assert cli("exec", "-H", "garden", "--", "true").stderr == ""
    ((kind, body),) = events(cli)
    assert (kind, body["template"]) == ("workspace_created", "minimal")


def test_a_hive_finds_its_memory_and_skills_and_cannot_change_them(garden: Cli, home: Path) -> None:
    shelf = home / ".local/share/skep/skills/pruning"
    shelf.mkdir()
    (shelf / "SKILL.md").write_text("cut above the eye\n")
    assert inside(garden, "garden", "cat hive/skills/system/pruning/SKILL.md") == "cut above the eye\n"
    assert 'name = "garden"' in inside(garden, "garden", "cat hive/.hive.toml")
    assert garden("exec", "-H", "garden", "--", "sh", "-c", "echo x > hive/MEMORY.md").returncode != 0


def test_hives_share_a_ticket(garden: Cli) -> None:
    garden("hive", "create", "orchard")
    share = ("--ticket", "spring", "--", "sh", "-c")
    assert garden("exec", "-H", "garden", *share, "echo 3 trees > ticket/list").returncode == 0
    assert garden("exec", "-H", "orchard", *share, "cat ticket/list").stdout == "3 trees\n"
    alone = garden("exec", "--ticket", "spring", "--", "true")
    assert (alone.returncode, "--hive" in alone.stderr) == (2, True)


def test_workspaces_are_listed_and_shown(garden: Cli) -> None:
    (row,) = json.loads(garden("workspace", "list", "--json").stdout)
    assert (row["id"], row["hive"], row["template"], row["state"]) == (
        workspace_of(garden),
        "garden",
        "minimal",
        "ready",
    )
    shown = json.loads(garden("workspace", "show", "garden", "--json").stdout)
    assert (shown["hive"], shown["below"]["snapshot_version"]) == ("garden", row["snapshot"])
    assert "nothing beyond the template" in garden("workspace", "show", "garden").stdout


def test_no_workspace_yet_is_said_with_what_to_do(cli: Cli) -> None:
    ran = cli("workspace", "list")
    assert (ran.returncode, "skep exec --hive" in ran.stderr) == (0, True)


def test_one_that_is_nobodys_is_made_and_used_by_its_id(cli: Cli) -> None:
    made = cli("workspace", "create", "scratch")
    assert (made.returncode, "next: skep exec --hive scratch" in made.stdout) == (0, True)
    inside(cli, "scratch", "echo 1 > one")
    assert cli("files", "get", "one", "-", "-H", "scratch").stdout == "1\n"
    again = cli("workspace", "create", "scratch")
    assert (again.returncode, "already" in again.stderr) == (2, True)


def test_a_checkpoint_is_returned_to_and_the_return_undone(garden: Cli) -> None:
    kept = garden("workspace", "checkpoint", "garden", "--name", "spring", "--note", "all sown")
    assert "skep workspace rollback garden" in kept.stdout
    inside(garden, "garden", "echo eaten > bed; echo snail > guest")
    told = garden("workspace", "diff", "garden", "spring").stdout
    assert "~ bed" in told and "-sown" in told and "+ guest" in told
    back = garden("workspace", "rollback", "garden", "spring")
    assert inside(garden, "garden", "cat bed; ls guest 2>&1 || true").startswith("sown\n")
    undo = back.stdout.rpartition(" ")[2].strip()
    garden("workspace", "rollback", "garden", undo)
    assert inside(garden, "garden", "cat bed guest") == "eaten\nsnail\n"
    assert [kind for kind, _ in events(garden)] == ["workspace_created", "checkpointed", "rolled_back", "rolled_back"]
    (_, body) = events(garden)[1]
    assert (body["name"], body["note"]) == ("spring", "all sown")


def test_nothing_changed_is_said(garden: Cli) -> None:
    garden("workspace", "checkpoint", "garden", "--name", "spring")
    assert garden("workspace", "diff", "garden", "spring").stdout == "nothing has changed\n"
    assert json.loads(garden("workspace", "diff", "garden", "spring", "--json").stdout)["files"] == []


def test_forks_begin_alike_and_go_their_own_ways(garden: Cli) -> None:
    assert garden("workspace", "fork", "garden", "try-1", "try-2").returncode == 0
    inside(garden, "try-1", "echo watered >> bed")
    assert inside(garden, "try-1", "cat bed") == "sown\nwatered\n"
    assert inside(garden, "try-2", "cat bed") == inside(garden, "garden", "cat bed") == "sown\n"
    assert events(garden)[-1] == ("workspace_forked", {"into": ["try-1", "try-2"]})


def test_a_fork_is_not_given_the_name_of_a_hive(garden: Cli) -> None:
    garden("hive", "create", "orchard")
    ran = garden("workspace", "fork", "garden", "orchard")
    assert (ran.returncode, "orchard is a hive" in ran.stderr) == (2, True)
    assert len(json.loads(garden("workspace", "list", "--json").stdout)) == 1


def test_what_is_destroyed_comes_back_from_its_archive(garden: Cli) -> None:
    before = workspace_of(garden)
    gone = garden("workspace", "destroy", "garden", "--yes")
    assert "skep workspace restore garden" in gone.stdout
    assert json.loads(garden("workspace", "list", "--json").stdout) == []
    back = garden("workspace", "restore", "garden", "--json")
    assert json.loads(back.stdout)["id"] == before
    assert inside(garden, "garden", "cat bed hive/.hive.toml").startswith("sown\n")
    kinds = [kind for kind, _ in events(garden)]
    assert kinds == ["workspace_created", "workspace_destroyed", "workspace_restored"]


def test_an_archive_comes_back_beside_what_is_there_and_never_over_it(garden: Cli) -> None:
    version = json.loads(garden("workspace", "archive", "garden", "--json").stdout)["version"]
    inside(garden, "garden", "echo eaten > bed")
    over = garden("workspace", "restore", "garden")
    assert (over.returncode, "--as" in over.stderr) == (2, True)
    assert garden("workspace", "restore", "garden", "--as", "garden-before", "--version", version).returncode == 0
    assert inside(garden, "garden-before", "cat bed") == "sown\n"
    assert inside(garden, "garden", "cat bed") == "eaten\n"
    (listed,) = json.loads(garden("workspace", "archive", "garden", "--list", "--json").stdout)
    assert listed["version"] == version


def test_an_archive_works_in_another_home_that_has_the_key_and_nothing_else(
    garden: Cli, home: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(json.dumps({"workspace": {"archive_url": str(home / "store")}}))
    workspace = workspace_of(garden)
    assert garden("workspace", "archive", "garden").returncode == 0
    elsewhere = home / "elsewhere"
    monkeypatch.setenv("SKEP_HOME", str(elsewhere))
    refused = garden("workspace", "restore", workspace)
    assert refused.returncode != 0
    shutil.copy(home / ".local/share/skep/keys/archive.key", elsewhere / "keys/archive.key")
    ran = garden("workspace", "restore", workspace, "--as", "garden")
    assert ran.returncode == 0, ran.stderr
    assert inside(garden, "garden", "cat bed; python -c 'print(6 * 7)'") == "sown\n42\n"


def test_removing_asks_first_and_without_an_archive_keeps_nothing(garden: Cli, program: Cli) -> None:
    asked = program("workspace", "destroy", "garden")
    assert (asked.returncode, "--yes" in asked.stderr) == (2, True)
    assert garden("workspace", "destroy", "garden", "--yes", "--no-archive").returncode == 0
    assert events(garden)[-1] == ("workspace_destroyed", {"archive": None})
    ran = garden("workspace", "restore", "garden")
    assert (ran.returncode, "no archive" in ran.stderr) == (2, True)


def test_the_workspace_of_a_deleted_hive_stays_and_is_reached_by_its_id(garden: Cli) -> None:
    hive, workspace = id_of(garden), workspace_of(garden)
    told = garden("hive", "delete", "garden", "--yes").stdout
    assert f"skep workspace destroy {hive}" in told
    assert json.loads(garden("workspace", "show", hive, "--json").stdout)["id"] == workspace
    assert inside(garden, hive, "cat bed") == "sown\n"
    assert garden("workspace", "destroy", hive, "--yes").returncode == 0


def test_nothing_starts_in_a_suspended_workspace_until_it_is_resumed(garden: Cli) -> None:
    garden("workspace", "suspend", "garden")
    ran = garden("exec", "-H", "garden", "--", "true")
    assert (ran.returncode, "skep workspace resume" in ran.stderr) == (2, True)
    garden("workspace", "resume", "garden")
    assert inside(garden, "garden", "cat bed") == "sown\n"


def test_without_overlays_everything_works_by_copies(cli: Cli, config: Path) -> None:
    config.write_text('{"workspace": {"layering": "copy"}}')
    cli("hive", "create", "garden")
    inside(cli, "garden", "echo sown > bed")
    cli("workspace", "checkpoint", "garden", "--name", "spring")
    inside(cli, "garden", "rm bed")
    cli("workspace", "fork", "garden", "bare")
    cli("workspace", "rollback", "garden", "spring")
    assert inside(cli, "garden", "cat bed") == "sown\n"
    assert inside(cli, "bare", "ls bed 2>/dev/null || echo none") == "none\n"
    cli("workspace", "destroy", "garden", "--yes")
    assert cli("workspace", "restore", "garden").returncode == 0
    assert inside(cli, "garden", "cat bed; python -c 'print(6 * 7)'") == "sown\n42\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "nobody"), 2, "no workspace nobody"),
        (("show", "No Such"), 2, "not a valid name"),
        (("create", "x", "--template", "nothing"), 2, "no template nothing"),
        (("rollback", "garden", "c9999"), 2, "no checkpoint"),
        (("diff", "garden", "c9999"), 2, "no checkpoint"),
        (("fork", "garden", "Bad Id"), 2, "not a valid id"),
        (("fork", "garden", "a", "a"), 2, "twice"),
        (("fork", "garden", "a", "b", "--with-checkpoints"), 2, "only one"),
        (("archive",), 2, "no workspace is named"),
        (("restore", "garden", "--version", "x"), 2, "already"),
        (("restore", "nobody"), 2, "no archive"),
        (("install", "garden"), 2, "no package is named"),
        (("install", "garden", "--node", "../up"), 2, "../up"),
    ],
)
def test_a_mistake_is_explained_and_changes_nothing(garden: Cli, words: tuple[str, ...], code: int, said: str) -> None:
    ran = garden("workspace", *words)
    assert (ran.returncode, said in ran.stderr) == (code, True), ran.stderr
    assert "Traceback" not in ran.stderr
    assert [kind for kind, _ in events(garden)] == ["workspace_created"]


def test_a_manifest_cut_short_is_damage_is_listed_as_such_and_mended_by_the_next_command(
    garden: Cli, home: Path
) -> None:
    (manifest,) = home.glob(".local/share/skep/workspaces/*/workspace.json")
    manifest.write_bytes(manifest.read_bytes()[:40])
    ran = garden("workspace", "show", "garden")
    assert (ran.returncode, "repair" in ran.stderr) == (6, True)
    (row,) = json.loads(garden("workspace", "list", "--json").stdout)
    assert row["state"] == "damaged"
    mended = garden("exec", "-H", "garden", "--", "cat", "bed")
    assert (mended.stdout, "wrote the manifest again" in mended.stderr) == ("sown\n", True)
    assert "workspace_repaired" in [kind for kind, _ in events(garden)]


def test_a_plain_folder_from_before_is_taken_in_with_its_files(cli: Cli, home: Path) -> None:
    cli("hive", "create", "garden")
    folder = home / ".local/share/skep/workspaces" / id_of(cli)
    folder.mkdir(parents=True)
    (folder / "bed").write_text("sown long ago\n")
    assert inside(cli, "garden", "cat bed; echo more >> bed; cat bed; python -c 'print(6 * 7)'").splitlines() == [
        "sown long ago",
        "sown long ago",
        "more",
        "42",
    ]
    assert "garden" in inside(cli, "garden", "cat hive/.hive.toml")


def test_archives_go_to_a_store_that_speaks_s3_with_keys_from_the_environment(
    garden: Cli, config: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as endpoint:
        Bucket(endpoint, "bees").create()
        config.write_text(json.dumps({"workspace": {"archive_url": f"s3://bees/hives?endpoint={endpoint}"}}))
        without = garden("workspace", "destroy", "garden", "--yes")
        assert (without.returncode, "SKEP_S3_ACCESS_KEY_ID" in without.stderr) == (2, True)
        monkeypatch.setenv("SKEP_S3_ACCESS_KEY_ID", "access")
        monkeypatch.setenv("SKEP_S3_SECRET_ACCESS_KEY", "planted-secret")
        assert garden("workspace", "destroy", "garden", "--yes").returncode == 0
        back = garden("workspace", "restore", "garden")
        assert back.returncode == 0, back.stderr
    assert inside(garden, "garden", "cat bed") == "sown\n"
    kept = [file for file in home.rglob("*") if file.is_file() and not file.is_symlink()]
    assert not any(b"planted-secret" in file.read_bytes() for file in kept)
