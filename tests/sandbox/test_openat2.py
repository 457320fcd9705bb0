"""Look-ups that the kernel itself keeps below a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from skep.sandbox.openat2 import BENEATH, IN_ROOT, NO_SYMLINKS, openat2

READ = os.O_RDONLY


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (inside / "sub" / "file").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    (inside / "up").symlink_to("../secret")
    (inside / "absolute").symlink_to("/sub/file")
    (inside / "loop").symlink_to("loop")
    (inside / "within").symlink_to("sub/file")
    fd = os.open(inside, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def _read(folder: int, path: str, resolve: int) -> str:
    with os.fdopen(openat2(folder, path, READ, resolve=resolve)) as file:
        return file.read()


@pytest.mark.parametrize("resolve", [BENEATH, IN_ROOT])
@pytest.mark.parametrize("path", ["sub/file", "./sub/../sub/file", "within"])
def test_what_is_below_is_opened(folder: int, path: str, resolve: int) -> None:
    assert _read(folder, path, resolve) == "inside"


@pytest.mark.parametrize("path", ["../secret", "up", "sub/../../secret", "/etc/passwd", "absolute"])
def test_beneath_refuses_every_way_out(folder: int, path: str) -> None:
    with pytest.raises(OSError, match="cross-device") as refused:
        _read(folder, path, BENEATH)
    assert refused.value.errno == errno.EXDEV


def test_in_root_reads_every_path_from_the_folder(folder: int) -> None:
    assert _read(folder, "absolute", IN_ROOT) == _read(folder, "/../../sub/file", IN_ROOT) == "inside"
    with pytest.raises(FileNotFoundError):
        _read(folder, "up", IN_ROOT)


def test_links_can_be_refused_altogether_and_loops_always_are(folder: int) -> None:
    for path, resolve in (("within", BENEATH | NO_SYMLINKS), ("loop", BENEATH), ("loop", IN_ROOT)):
        with pytest.raises(OSError) as refused:
            _read(folder, path, resolve)
        assert refused.value.errno == errno.ELOOP


def test_links_into_other_processes_are_never_followed() -> None:
    fd = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    try:
        for path in ("self/root/etc/passwd", "self/cwd", "self/exe"):
            with pytest.raises(OSError) as refused:
                openat2(fd, path, os.O_PATH, resolve=IN_ROOT)
            assert refused.value.errno == errno.ELOOP
    finally:
        os.close(fd)


def test_the_empty_path_is_the_folder_itself(folder: int) -> None:
    fd = openat2(folder, "", os.O_PATH, resolve=BENEATH)
    assert os.fstat(fd).st_ino == os.fstat(folder).st_ino
    os.close(fd)


def test_a_path_with_a_nul_is_refused_and_not_cut_short(folder: int) -> None:
    with pytest.raises(OSError) as refused:
        openat2(folder, "sub/file\0/../../../secret", READ, resolve=BENEATH)
    assert refused.value.errno == errno.EINVAL


def test_descriptors_go_to_no_child_and_files_are_made_with_their_mode(folder: int) -> None:
    fd = openat2(folder, "new", os.O_CREAT | os.O_WRONLY, mode=0o640, resolve=BENEATH)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert os.fstat(fd).st_mode & 0o777 == 0o640
    os.close(fd)
