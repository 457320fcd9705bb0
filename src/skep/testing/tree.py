"""Promises about the files of a sandbox."""
# ruff: noqa: S108 - these are paths inside

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import AsyncIterator
from typing import Any

import pytest

from skep.errors import Conflict, Denied, InvalidRequest, LimitReached, NotFound, SkepError
from skep.sandbox.files import Change
from skep.sandbox.sandbox import Sandbox
from skep.testing.promise import promise

MIB = 1 << 20
GIB = 1 << 30
NAMES = ["plain", "two words", "żółć", "new\nline", "-rf", "$HOME", "'quoted\"", "*", ".hidden", "a\\b", "x" * 255]


class FilePromises:
    """Files are read and changed by the paths that a command inside would use."""

    @promise
    async def test_what_is_written_is_read_back_here_and_inside(self, sandbox: Sandbox) -> None:
        data = os.urandom(100_000)
        await sandbox.files.write("file", data)
        assert await sandbox.files.read("file") == data
        assert (await sandbox.run(["cat", "/workspace/file"])).stdout == data
        await sandbox.run(["cp", "file", "/tmp/copy"])
        assert await sandbox.files.read("/tmp/copy") == data

    @promise
    async def test_text_is_written_as_utf_8(self, sandbox: Sandbox) -> None:
        await sandbox.files.write("note", "żółć")
        assert await sandbox.files.read("note") == "żółć".encode()

    @pytest.mark.parametrize("place", ["file", "/workspace/file", "./a/../file", "/tmp/file", "/cache/file"])
    @promise
    async def test_a_path_means_what_it_means_inside(self, sandbox: Sandbox, place: str) -> None:
        await sandbox.files.write(place, b"here")
        assert (await sandbox.run(["cat", posixpath.normpath(place)])).stdout == b"here"

    @pytest.mark.parametrize("name", NAMES)
    @promise
    async def test_any_name_is_a_name(self, sandbox: Sandbox, name: str) -> None:
        await sandbox.files.write(f"folder/{name}", name)
        assert [entry.name for entry in await sandbox.files.list("folder")] == [name]
        assert (await sandbox.run(["cat", "--", f"folder/{name}"])).text == name
        await sandbox.files.remove(f"folder/{name}")
        assert await sandbox.files.list("folder") == []

    @promise
    async def test_writing_makes_folders_and_replaces(self, sandbox: Sandbox) -> None:
        await sandbox.files.write("a/b/c/file", b"long text")
        await sandbox.files.write("a/b/c/file", b"short")
        assert await sandbox.files.read("a/b/c/file") == b"short"
        assert [entry.name for entry in await sandbox.files.list("a/b/c")] == ["file"]

    @promise
    async def test_a_reader_sees_the_old_or_the_new_bytes(self, sandbox: Sandbox) -> None:
        await sandbox.files.write("file", b"a" * MIB)
        reader = await sandbox.start("while [ ! -e stop ]; do tr -s ab < file; echo; done")
        for letter in (b"b", b"a") * 10:
            await sandbox.files.write("file", letter * MIB)
        await sandbox.files.write("stop", b"")
        seen = b"".join([chunk async for chunk in reader.stdout])
        assert set(seen.split()) <= {b"a", b"b"}
        reader.release()

    @promise
    async def test_many_writers_of_one_file_leave_one_of_their_texts(self, sandbox: Sandbox) -> None:
        texts = [bytes([65 + number]) * 100_000 for number in range(16)]
        await asyncio.gather(*(sandbox.files.write("file", text) for text in texts))
        assert await sandbox.files.read("file") in texts
        assert [entry.name for entry in await sandbox.files.list()] == ["file"]

    @promise
    async def test_both_sides_may_change_each_others_files(self, sandbox: Sandbox) -> None:
        await sandbox.files.write("ours", b"1")
        await sandbox.run("echo 2 >> ours; mkdir theirs; echo 3 > theirs/file; chmod 600 theirs/file; chmod 700 theirs")
        assert await sandbox.files.read("ours") == b"12\n"
        await sandbox.files.append("theirs/file", b"4")
        assert (await sandbox.run("cat theirs/file && rm -r ours theirs")).stdout == b"3\n4"

    @promise
    async def test_a_mode_is_kept_or_set(self, sandbox: Sandbox) -> None:
        await sandbox.files.write("tool", b"#!/bin/sh\necho ran\n", mode=0o755)
        assert (await sandbox.run(["./tool"])).stdout == b"ran\n"
        await sandbox.files.write("tool", b"#!/bin/sh\necho again\n")
        assert (await sandbox.run(["./tool"])).stdout == b"again\n"
        assert (await sandbox.files.stat("tool")).mode == 0o755
        await sandbox.files.write("tool", b"", mode=0o6777)
        assert (await sandbox.files.stat("tool")).mode == 0o777

    @promise
    async def test_appending_adds_to_the_end_or_makes_the_file(self, sandbox: Sandbox) -> None:
        for word in ("one ", b"two ", "three"):
            await sandbox.files.append("new/log", word)
        assert await sandbox.files.read("new/log") == b"one two three"

    @promise
    async def test_many_appenders_lose_nothing(self, sandbox: Sandbox) -> None:
        await sandbox.files.write("log", b"")
        await asyncio.gather(*(sandbox.files.append("log", f"line {number}\n") for number in range(50)))
        lines = (await sandbox.files.read("log")).decode().splitlines()
        assert sorted(lines) == sorted(f"line {number}" for number in range(50))

    @promise
    async def test_a_folder_is_listed_by_name_with_what_each_entry_is(self, sandbox: Sandbox) -> None:
        await sandbox.run("mkdir d; printf 12345 > b; ln -s /nowhere/at/all c; mkfifo a; chmod 640 b")
        entries = await sandbox.files.list(".")
        assert [(entry.name, entry.kind) for entry in entries] == [
            ("a", "other"), ("b", "file"), ("c", "link"), ("d", "folder"),
        ]  # fmt: skip
        assert (entries[1].size, entries[1].mode, entries[2].target) == (5, 0o640, "/nowhere/at/all")
        assert entries[1].modified_at > 1e9

    @promise
    async def test_what_is_at_a_path_is_described(self, sandbox: Sandbox) -> None:
        await sandbox.run("mkdir d; printf 123 > d/f; ln -s d/f l")
        assert (await sandbox.files.stat("d/f")).size == 3
        assert (await sandbox.files.stat("l")).kind == "link"
        for folder in ("d", ".", "/", "/workspace", "/tmp/"):
            assert (await sandbox.files.stat(folder)).kind == "folder", folder

    @promise
    async def test_moving_renames_and_replaces(self, sandbox: Sandbox) -> None:
        await sandbox.files.write("a", b"a")
        await sandbox.files.write("b", b"b")
        await sandbox.files.move("a", "b")
        assert await sandbox.files.read("b") == b"a"
        await sandbox.files.move("b", "new/folder/c")
        await sandbox.files.move("new", "old")
        assert await sandbox.files.read("old/folder/c") == b"a"
        assert [entry.name for entry in await sandbox.files.list()] == ["old"]

    @promise
    async def test_removing_takes_a_file_an_empty_folder_or_all_of_one(self, sandbox: Sandbox) -> None:
        await sandbox.run("mkdir -p empty full/deep; touch file full/deep/f; ln -s full link; touch keep")
        for path in ("file", "empty", "link"):
            await sandbox.files.remove(path)
        with pytest.raises(Conflict):
            await sandbox.files.remove("full")
        await sandbox.files.remove("full", recursive=True)
        assert [entry.name for entry in await sandbox.files.list()] == ["keep"]

    @promise
    async def test_removing_all_of_a_folder_spares_what_its_links_point_to(self, sandbox: Sandbox) -> None:
        await sandbox.run(
            "mkdir victim folder; touch victim/f; ln -s ../victim folder/l; ln -s /tmp folder/t; touch /tmp/x"
        )
        await sandbox.files.remove("folder", recursive=True)
        assert (await sandbox.run("ls victim/f /tmp/x")).ok

    @promise
    async def test_making_a_folder_makes_those_above_and_may_be_repeated(self, sandbox: Sandbox) -> None:
        await sandbox.files.mkdir("a/b/c")
        await sandbox.files.mkdir("a/b/c")
        assert (await sandbox.run("rmdir a/b/c && echo ours")).stdout == b"ours\n"

    @promise
    async def test_what_is_not_there_is_not_found(self, sandbox: Sandbox) -> None:
        files = sandbox.files
        for call in (
            files.read("no"), files.stat("no/such"), files.list("no"), files.remove("no"), files.move("no", "x"),
            anext(files.stream("no")), anext(files.watch("no")),
        ):  # fmt: skip
            with pytest.raises(NotFound) as missing:
                await call
            assert "no" in missing.value.message

    @promise
    async def test_a_file_is_no_folder_and_a_folder_no_file(self, sandbox: Sandbox) -> None:
        await sandbox.run("mkdir folder; touch file")
        files = sandbox.files
        for call in (
            files.read("folder"), files.write("folder", b""), files.append("folder", b""), files.list("file"),
            files.write("file/below", b""), files.mkdir("file/below"), files.mkdir("file"), files.write("/", b""),
            files.write("folder/.", b""), files.move("folder", "file"), anext(files.watch("file")),
        ):  # fmt: skip
            with pytest.raises(InvalidRequest):
                await call

    @pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "x" * 300, "\ud800"], ids=["nul", "path", "name", "text"])
    @promise
    async def test_a_path_that_cannot_be_is_the_callers_mistake(self, sandbox: Sandbox, path: str) -> None:
        for call in (sandbox.files.write(path, b""), sandbox.files.mkdir(path), sandbox.files.stat(path)):
            with pytest.raises(InvalidRequest):
                await call

    @promise
    async def test_places_that_are_read_only_inside_are_so_here(self, sandbox: Sandbox) -> None:
        for call in (
            sandbox.files.write("/etc/new", b""), sandbox.files.append("/etc/passwd", b"x"),
            sandbox.files.remove("/etc/passwd"), sandbox.files.mkdir("/new"), sandbox.files.move("/etc/passwd", "p"),
        ):  # fmt: skip
            with pytest.raises(Denied):
                await call
        assert b"agent:" in await sandbox.files.read("/etc/passwd")

    @promise
    async def test_a_file_larger_than_the_limit_is_not_read_at_once(self, sandbox: Sandbox) -> None:
        await sandbox.files.write("file", b"12345")
        assert await sandbox.files.read("file", limit_bytes=5) == b"12345"
        with pytest.raises(LimitReached):
            await sandbox.files.read("file", limit_bytes=4)

    @promise
    async def test_an_empty_file_is_a_file(self, sandbox: Sandbox) -> None:
        await sandbox.files.write("empty", b"")
        assert await sandbox.files.read("empty") == b""
        assert [piece async for piece in sandbox.files.stream("empty")] == []

    @promise
    async def test_a_gigabyte_is_read_and_written_in_pieces(self, sandbox: Sandbox) -> None:
        await sandbox.run(["truncate", "-s", str(GIB), "big"])
        before, seen, most = _resident_bytes(), 0, 0

        async def passed_on() -> AsyncIterator[bytes]:
            nonlocal seen, most
            async for piece in sandbox.files.stream("big"):
                seen, most = seen + len(piece), max(most, _resident_bytes() - before)
                yield piece

        await sandbox.files.write("copy", passed_on())
        assert (seen, (await sandbox.files.stat("copy")).size) == (GIB, GIB)
        assert most < 100 * MIB

    @promise
    async def test_a_write_that_breaks_off_leaves_what_was_there(self, sandbox: Sandbox) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield b"new bytes"
            raise ConnectionError("the sender is gone")

        await sandbox.files.write("file", b"old")
        with pytest.raises(ConnectionError):
            await sandbox.files.write("file", broken())
        assert await sandbox.files.read("file") == b"old"
        assert [entry.name for entry in await sandbox.files.list()] == ["file"]

    @promise
    async def test_a_cancelled_write_leaves_nothing_behind(self, sandbox: Sandbox) -> None:
        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 1000
                await asyncio.sleep(0)

        for steps in range(20):
            write = asyncio.ensure_future(sandbox.files.write("file", endless()))
            for _ in range(steps * 3):
                await asyncio.sleep(0)
            write.cancel()
            with pytest.raises(asyncio.CancelledError):
                await write
        deadline = asyncio.get_running_loop().time() + 5
        while await sandbox.files.list():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)


class HostileFilePromises:
    """What somebody inside has planted leads nowhere else and blocks nothing."""

    @pytest.mark.parametrize("path", ["../../../etc/passwd", "/../etc/passwd", "a/../../etc/passwd"])
    @promise
    async def test_dots_do_not_lead_out(self, sandbox: Sandbox, path: str) -> None:
        assert b"agent:x:" in await sandbox.files.read(path)

    @promise
    async def test_a_link_is_followed_as_inside_and_never_out(self, sandbox: Sandbox) -> None:
        await sandbox.run("ln -s /etc/passwd absolute; ln -s ../../../../../etc/passwd relative; ln -s loop loop")
        inside = (await sandbox.run(["cat", "/etc/passwd"])).stdout
        assert await sandbox.files.read("absolute") == await sandbox.files.read("relative") == inside
        with pytest.raises(Denied):
            await sandbox.files.read("loop")

    @promise
    async def test_writing_replaces_a_link_instead_of_what_it_points_to(self, sandbox: Sandbox) -> None:
        await sandbox.run("echo kept > target; ln -s target link")
        await sandbox.files.write("link", b"new")
        assert ((await sandbox.files.stat("link")).kind, await sandbox.files.read("target")) == ("file", b"kept\n")

    @promise
    async def test_only_regular_files_are_opened_and_nothing_blocks(self, sandbox: Sandbox) -> None:
        await sandbox.run(
            "mkfifo fifo; ln -s fifo link; ln -s /dev/zero zero; ln -s /dev/tty tty; ln -s /proc/1/mem mem"
        )
        for path in ("fifo", "link", "zero", "tty", "mem", "/dev/null", "/dev/stdin", "/proc/kmsg", "/proc/version"):
            for call in (sandbox.files.read(path), anext(sandbox.files.stream(path))):
                with pytest.raises((Denied, NotFound)):
                    await asyncio.wait_for(call, 5)
        for path in ("fifo", "link", "zero", "/dev/null"):
            with pytest.raises(Denied):
                await asyncio.wait_for(sandbox.files.append(path, b"x"), 5)

    @promise
    async def test_a_file_with_other_names_is_not_appended_to(self, sandbox: Sandbox) -> None:
        await sandbox.run("echo one > first; ln first second")
        with pytest.raises(Denied):
            await sandbox.files.append("second", b"two")
        await sandbox.files.write("second", b"two")
        assert await sandbox.files.read("first") == b"one\n"

    @promise
    async def test_folders_too_deep_for_one_path_are_no_trouble(self, sandbox: Sandbox) -> None:
        await sandbox.run("p=$(printf 'deep/%.0s' {1..700}); for i in 1 2 3; do mkdir -p $p && cd -P $p; done; pwd")
        assert (await sandbox.files.stat("deep/deep")).kind == "folder"
        await sandbox.files.remove("deep", recursive=True)
        assert await sandbox.files.list() == []

    @promise
    async def test_a_folder_being_swapped_for_a_link_never_leads_out(self, sandbox: Sandbox) -> None:
        swap = (
            "mkdir -p real; ln -s /etc away; while :; do mv -T real d; mv -T d real; mv -T away d; mv -T d away; done"
        )
        job = await sandbox.background(f"({swap}) 2>/dev/null")
        for number in range(200):
            try:
                await sandbox.files.write(f"d/{number}", b"x")
            except SkepError:
                continue
        await job.kill()
        listing = await sandbox.run("ls /etc")
        assert not any(name.isdigit() for name in listing.text.split())


class WatchPromises:
    """Changes are told while they happen."""

    @promise
    async def test_what_is_made_changed_and_removed_is_told(self, sandbox: Sandbox) -> None:
        changes = await _watching(sandbox)
        await sandbox.run("echo 1 > file; echo 2 >> file; mv file other; rm other")
        seen = await _until(changes, Change("removed", "other"))
        wanted = [("created", "file"), ("modified", "file"), ("removed", "file"), ("created", "other")]
        positions = [seen.index(Change(kind, path)) for kind, path in wanted]  # type: ignore[arg-type]
        assert positions == sorted(positions)
        await changes.aclose()

    @promise
    async def test_folders_made_later_are_watched_too(self, sandbox: Sandbox) -> None:
        changes = await _watching(sandbox)
        await sandbox.run("mkdir -p a/b/c; echo 1 > a/b/c/file")
        await _until(changes, Change("created", "a/b/c/file"))
        await sandbox.run("mv a z; echo 1 > z/b/c/late")
        await _until(changes, Change("created", "z/b/c/late"))
        await changes.aclose()

    @promise
    async def test_what_the_host_writes_is_told(self, sandbox: Sandbox) -> None:
        changes = await _watching(sandbox)
        await sandbox.files.write("file", b"1")
        await _until(changes, Change("created", "file"))
        await changes.aclose()

    @promise
    async def test_a_watch_is_of_one_folder(self, sandbox: Sandbox) -> None:
        await sandbox.run("mkdir in out")
        changes = await _watching(sandbox, "in")
        await sandbox.run("touch out/no in/yes")
        seen = await _until(changes, Change("created", "yes"))
        assert not any("no" in change.path for change in seen)
        await changes.aclose()

    @promise
    async def test_a_storm_of_changes_is_told_or_said_to_be_too_much(self, sandbox: Sandbox) -> None:
        changes = await _watching(sandbox)
        await sandbox.run("for i in $(seq 30000); do : > f; done; touch last", timeout_s=60)
        async for change in changes:
            if change.kind == "overflow" or change.path == "last":
                break
        await changes.aclose()


async def _watching(sandbox: Sandbox, path: str = ".") -> Any:
    """Return the changes of a folder, already being watched: a probe file has been seen."""
    changes = sandbox.files.watch(path)
    first = asyncio.ensure_future(anext(changes))
    while not first.done():
        await sandbox.files.write(f"{path}/probe", b"")
        await asyncio.wait([first], timeout=0.01)
    first.result()
    await sandbox.files.write(f"{path}/armed", b"")
    await _until(changes, Change("created", "armed"))
    return changes


async def _until(changes: Any, last: Change) -> list[Change]:
    seen = []
    async with asyncio.timeout(20):
        async for change in changes:
            seen.append(change)
            if change == last:
                break
    return seen


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
