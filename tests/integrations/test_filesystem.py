"""The files of a sandbox answer as those of the standard library do."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skep import Limits, Sandbox
from skep.integrations.command import carry_out
from skep.integrations.filesystem import Filesystem

SCENE = """
mkdir -p folder/deep; echo text > folder/file; ln -s folder/deep way; ln -s ../.. folder/deep/up; ln -s b a; ln -s a b
ln -s /etc/hostname out; ln -s new fresh; mkfifo pipe; mkdir shut; chmod 0 shut; echo x > kept; chmod 444 kept
"""


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox.create(limits=Limits(tmp_bytes=1 << 20)) as made:
        assert (await made.run(SCENE)).ok
        yield made
        await made.run("chmod 755 shut")


@pytest.fixture
def files(sandbox: Sandbox) -> Filesystem:
    return Filesystem(sandbox.files)


async def number(work: object) -> int | None:
    """Return the number of the error that some work ends with."""
    with pytest.raises(OSError) as error:
        await work  # type: ignore[misc]
    return error.value.errno


async def test_each_mistake_has_the_number_that_the_kernel_gives_it(files: Filesystem) -> None:
    assert await number(files.read("none")) == errno.ENOENT
    assert await number(files.read("folder")) == errno.EISDIR
    assert await number(files.read("folder/file/below")) == errno.ENOTDIR
    assert await number(files.read("way/none")) == errno.ENOENT
    assert await number(files.read("shut/x")) == errno.EACCES
    assert await number(files.read("nul\0")) == errno.EINVAL
    assert await number(files.write("folder", b"")) == errno.EISDIR
    assert await number(files.write("way", b"")) == errno.EISDIR
    assert await number(files.write("folder/file/below", b"")) == errno.ENOTDIR
    assert await number(files.write("kept", b"")) == errno.EACCES
    assert await number(files.write("/usr/x", b"")) == errno.EACCES
    assert await number(files.write("pipe", b"")) == errno.EINVAL
    assert await number(files.write("a", b"")) == errno.ELOOP
    assert await number(files.write("/tmp/big", bytes(2 << 20))) == errno.ENOSPC
    assert await number(files.list("kept")) == errno.ENOTDIR
    assert await number(files.mkdir("kept")) == errno.EEXIST
    assert await number(files.mkdir("kept/below")) == errno.ENOTDIR
    assert await number(files.remove("none")) == errno.ENOENT


@pytest.mark.parametrize(
    ("path", "real"),
    [
        (".", "/workspace"),
        ("/", "/"),
        ("way/x", "/workspace/folder/deep/x"),
        ("way/..", "/workspace/folder"),
        ("way/up/kept", "/workspace/kept"),
        ("out", "/etc/hostname"),
        ("none/../kept", "/workspace/kept"),
        ("/../../workspace//./folder/", "/workspace/folder"),
        ("fresh", "/workspace/new"),
    ],
)
async def test_links_are_followed_as_the_kernel_follows_them(
    sandbox: Sandbox, files: Filesystem, path: str, real: str
) -> None:
    assert await files.realpath(path) == real
    told = await sandbox.run(["python3", "-c", "import os, sys; print(os.path.realpath(sys.argv[1]))", path])
    assert told.text == f"{real}\n"


async def test_a_link_is_written_through_even_to_a_file_that_is_not_there_yet(
    sandbox: Sandbox, files: Filesystem
) -> None:
    await files.write("fresh", b"made")
    assert (await sandbox.run("cat new; readlink fresh")).text == "madenew\n"
    assert (await files.stat("fresh")).kind == "file"


async def test_a_link_out_of_the_sandbox_leads_to_the_same_place_inside(sandbox: Sandbox, files: Filesystem) -> None:
    assert await files.read("out") == b"skep\n"
    await sandbox.run("ln -s /proc/1/root/etc/shadow thief; ln -s ../../../../../../../../etc/hostname far")
    assert await files.read("far") == b"skep\n"
    assert await number(files.read("thief")) in (errno.EACCES, errno.ENOENT)
    # The control: outside, the same path leads to something else.
    assert Path("/etc/hostname").read_bytes() != b"skep\n"


async def test_all_that_a_command_printed_is_kept_though_something_holds_its_pipes(sandbox: Sandbox) -> None:
    command = "sleep 60 & head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2"
    ran = await carry_out(sandbox, command, keep_bytes=3_000_000)
    assert (len(ran.stdout), len(ran.stderr), ran.truncated, ran.exit_code) == (3_000_000, 3_000_000, False, 0)


async def test_a_command_may_take_longer_than_the_sandbox_lets_others_take() -> None:
    async with Sandbox.create(limits=Limits(command_s=0.2, command_cap_s=0.2)) as brief:
        assert (await brief.run("sleep 1; echo done")).limit == "time"
        assert (await carry_out(brief, "sleep 1; echo done", keep_bytes=100)).text == "done\n"
