"""Counting what a tree holds, whatever somebody has made of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from skep.sandbox.census import Census, Usage
from skep.sandbox.erase import erase


def _count(folder: Path) -> Usage:
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        return Census.take(fd)
    finally:
        os.close(fd)


def test_it_agrees_with_du(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"folder{number}" / "deeper").mkdir(parents=True)
        (tmp_path / f"folder{number}" / "deeper" / "file").write_bytes(b"x" * number * 5000)
    size, _ = subprocess.run(["du", "-s", "-B1", tmp_path], capture_output=True, text=True, check=True).stdout.split()
    listed = subprocess.run(["find", tmp_path, "-mindepth", "1"], capture_output=True, text=True, check=True).stdout
    top = tmp_path.stat().st_blocks * 512  # du counts the folder itself
    assert _count(tmp_path) == Usage(int(size) - top, len(listed.splitlines()))


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    assert _count(tmp_path) == Usage(0, 0)


def test_depth_hides_nothing(tmp_path: Path) -> None:
    before = Path.cwd()
    (tmp_path / "d").mkdir()
    os.chdir(tmp_path / "d")
    try:
        for _ in range(1200):
            Path("d").mkdir()
            os.chdir("d")
        Path("file").write_bytes(b"x" * 100_000)
    finally:
        os.chdir(before)
    counted = _count(tmp_path)
    assert counted.inodes == 1202
    assert counted.size >= 100_000
    erase(str(tmp_path / "d"), (tmp_path / "d").stat().st_ino)


def test_a_shut_folder_hides_nothing_and_stays_shut(tmp_path: Path) -> None:
    for mode in (0o000, 0o100, 0o200, 0o400, 0o600, 0o300):
        folder = tmp_path / oct(mode)
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "file").write_bytes(b"x" * 100_000)
        (folder / "inner").chmod(mode)
        folder.chmod(mode)
    counted = _count(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    for path in tmp_path.iterdir():
        path.chmod(0o700)
        (path / "inner").chmod(0o700)
    assert counted.inodes == 18
    assert counted.size >= 600_000
    assert modes == {name: int(name, 8) for name in modes}


def test_a_top_that_is_shut_is_counted_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    tmp_path.chmod(0)
    counted = _count(tmp_path)
    mode = tmp_path.stat().st_mode & 0o777
    tmp_path.chmod(0o700)
    assert (counted.inodes, mode) == (1, 0)


def test_a_file_with_many_names_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    once = _count(tmp_path)
    for number in range(10):
        os.link(tmp_path / "file", tmp_path / f"name{number}")
    assert _count(tmp_path) == once


def test_what_links_point_to_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/usr")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert _count(tmp_path).inodes == 2


def test_counting_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    before = _descriptors()
    _count(tmp_path)
    assert _descriptors() == before


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}
