"""skep files lists, copies and edits what is in a hive's workspace, with nothing running."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Ran = subprocess.CompletedProcess[str]
Cli = Callable[..., Ran]


def test_a_file_goes_in_is_listed_and_comes_out(garden: Cli, home: Path) -> None:
    (home / "in.bin").write_bytes(bytes(range(256)) * 1000)
    assert garden("files", "put", str(home / "in.bin"), "data/in.bin", "-H", "garden").returncode == 0
    (entry,) = json.loads(garden("files", "ls", "data", "-H", "garden", "--json").stdout)
    assert (entry["name"], entry["kind"], entry["size"]) == ("in.bin", "file", 256_000)
    assert garden("files", "get", "data/in.bin", str(home / "out.bin"), "-H", "garden").returncode == 0
    assert (home / "out.bin").read_bytes() == (home / "in.bin").read_bytes()


def test_what_is_put_is_the_sandbox_users_own(garden: Cli, home: Path) -> None:
    (home / "note").write_text("from outside")
    garden("files", "put", str(home / "note"), "-H", "garden")
    ran = garden("exec", "-H", "garden", "--", "sh", "-c", "cat note; echo more >> note; cat note")
    assert ran.stdout == "from outsidefrom outsidemore\n"


def test_a_file_can_be_shown(garden: Cli) -> None:
    garden("exec", "-H", "garden", "--", "sh", "-c", "echo inside > note")
    assert garden("files", "get", "note", "-", "-H", "garden").stdout == "inside\n"


def test_an_editor_changes_a_file(garden: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    garden("exec", "-H", "garden", "--", "sh", "-c", "echo red > note")
    monkeypatch.setenv("EDITOR", "sed -i s/red/blue/")
    assert "saved" in garden("files", "edit", "note", "-H", "garden").stdout
    assert garden("files", "get", "note", "-", "-H", "garden").stdout == "blue\n"
    assert "unchanged" in garden("files", "edit", "note", "-H", "garden").stdout


def test_a_file_that_changed_while_it_was_edited_is_not_overwritten(
    garden: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    garden("exec", "-H", "garden", "--", "sh", "-c", "echo red > note")
    (note,) = home.glob(".local/share/skep/trees/*/tree/note")
    editor = home / "editor"
    editor.write_text(f'#!/bin/sh\necho theirs > {note}\necho mine > "$1"\n')
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    ran = garden("files", "edit", "note", "-H", "garden")
    assert ran.returncode == 2
    assert "changed while you edited" in ran.stderr
    assert note.read_text() == "theirs\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("get", "nothing", "-"), "nothing at"),
        (("get", "../../etc/passwd", "-"), "not below /workspace"),
        (("put", "/no/such/file"), "cannot be read"),
        (("put", "-"), "no name"),
        (("ls", "nothing"), "nothing at"),
    ],
)
def test_a_mistake_is_explained(garden: Cli, words: tuple[str, ...], said: str) -> None:
    ran = garden("files", *words, "-H", "garden")
    assert ran.returncode == 2
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_link_out_of_the_workspace_is_not_followed(garden: Cli, home: Path) -> None:
    (home / "secret").write_text("private")
    garden("exec", "-H", "garden", "--", "ln", "-s", str(home / "secret"), "link")
    ran = garden("files", "get", "link", "-", "-H", "garden")
    assert ran.returncode != 0
    assert "private" not in ran.stdout
