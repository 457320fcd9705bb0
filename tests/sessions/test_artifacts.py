"""What an agent puts into output/display is collected once per change, and kept as it was read."""

from __future__ import annotations

import asyncio
import io
import os
import stat
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image

from skep.errors import Corrupt, InvalidRequest, NotFound, SandboxLost
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.tree import Tree
from skep.sessions.artifacts import Bounds, Collected, collect
from skep.sessions.previews import ImagePreview, TablePreview, TextPreview
from skep.sessions.shelf import Shelf


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / "workspace"


@pytest.fixture
def files(workspace: Path) -> Iterator[Tree]:
    tree = Tree.at(str(workspace))
    yield tree
    tree.close()


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "home" / "artifacts")


async def kept(shelf: Shelf, digest: str) -> bytes:
    return b"".join([piece async for piece in shelf.get(digest)])


def paths(collected: Collected) -> list[str]:
    return [artifact.path.removeprefix("output/display/") for artifact in collected.artifacts]


def skipped(collected: Collected) -> dict[str, str]:
    return {one.path.removeprefix('"output/display/').rstrip('"'): one.reason for one in collected.skipped}


async def test_what_a_command_leaves_there_is_collected(shelf: Shelf) -> None:
    async with Sandbox.create() as sandbox:
        await sandbox.run("mkdir -p output/display/more && echo hello > output/display/more/a.txt")
        collected = await collect(sandbox.files, known={}, shelf=shelf)
    (artifact,) = collected.artifacts
    assert (artifact.path, artifact.name) == ("output/display/more/a.txt", "a.txt")
    assert (artifact.size, artifact.media_type) == (6, "text/plain")
    assert artifact.sha256 == sha256(b"hello\n").hexdigest()
    assert artifact.preview == TextPreview(("hello",), more=False)
    assert await kept(shelf, artifact.sha256) == b"hello\n"


async def test_without_the_folder_there_is_nothing(files: Tree, shelf: Shelf) -> None:
    assert await collect(files, known={}, shelf=shelf) == Collected((), (), {})


async def test_only_changed_files_are_collected_again(files: Tree, shelf: Shelf) -> None:
    for name in ("same", "touched", "changed", "removed"):
        await files.write(f"output/display/{name}", name.encode())
    first = await collect(files, known={}, shelf=shelf)
    assert paths(first) == ["changed", "removed", "same", "touched"]
    await files.write("output/display/touched", b"touched")
    await files.write("output/display/changed", b"Changed")  # as many bytes as before
    await files.write("output/display/new", b"new")
    await files.remove("output/display/removed")
    second = await collect(files, known=first.hashes, shelf=shelf)
    assert paths(second) == ["changed", "new"]
    third = await collect(files, known=second.hashes, shelf=shelf)
    assert (paths(third), third.hashes) == ([], second.hashes)
    assert "output/display/removed" not in third.hashes


async def test_a_change_that_keeps_size_and_time_is_seen(files: Tree, shelf: Shelf, workspace: Path) -> None:
    await files.write("output/display/a", b"one")
    first = await collect(files, known={}, shelf=shelf)
    there = workspace / "output/display/a"
    times = there.stat()
    there.write_bytes(b"two")
    os.utime(there, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert paths(await collect(files, known=first.hashes, shelf=shelf)) == ["a"]


async def test_the_type_is_that_of_the_bytes(files: Tree, shelf: Shelf) -> None:
    await files.write("output/display/harmless.txt", b"\x7fELF\x02\x01\x01" + bytes(40))
    await files.write("output/display/picture.png", b"<html><script>alert(1)</script>")
    collected = await collect(files, known={}, shelf=shelf)
    assert [artifact.media_type for artifact in collected.artifacts] == ["application/x-elf", "text/html"]


async def test_names_are_cleaned_for_delivery(files: Tree, shelf: Shelf) -> None:
    for name in ("a.txt", "A.TXT", "sub/a.txt", ".hidden", "-rf", "con.txt", "line\nbreak\x1b[2J.txt"):
        await files.write(f"output/display/{name}", b"1")
    collected = await collect(files, known={}, shelf=shelf)
    assert sorted(artifact.name for artifact in collected.artifacts) == [
        "A.TXT", "_-rf", "_.hidden", "_con.txt", "a-2.txt", "a-3.txt", "line break[2J.txt",
    ]  # fmt: skip


async def test_links_and_what_is_no_file_are_named_and_left(files: Tree, shelf: Shelf, workspace: Path) -> None:
    await files.write("output/display/real", b"1")
    display = workspace / "output/display"
    (display / "link").symlink_to("real")
    (display / "folder").symlink_to("/")
    os.mkfifo(display / "pipe")
    collected = await collect(files, known={}, shelf=shelf)
    assert paths(collected) == ["real"]
    assert skipped(collected) == {"link": "it is a link", "folder": "it is a link", "pipe": "it is no regular file"}


@pytest.mark.parametrize("place", ["output", "output/display"])
async def test_a_link_on_the_way_there_is_not_followed(place: str, files: Tree, shelf: Shelf, workspace: Path) -> None:
    await files.write("elsewhere/display/a", b"1")
    (workspace / place).parent.mkdir(exist_ok=True)
    (workspace / place).symlink_to(workspace / "elsewhere" if place == "output" else "../elsewhere/display")
    collected = await collect(files, known={}, shelf=shelf)
    assert (collected.artifacts, [one.reason for one in collected.skipped]) == ((), ["it is no folder"])


async def test_a_file_too_large_is_named_and_what_was_known_of_it_stays(files: Tree, shelf: Shelf) -> None:
    await files.write("output/display/a", b"x" * 10)
    known = (await collect(files, known={}, shelf=shelf)).hashes
    await files.write("output/display/a", b"x" * 11)
    collected = await collect(files, known=known, shelf=shelf, bounds=Bounds(file_bytes=10))
    assert (collected.artifacts, collected.hashes) == ((), known)
    assert skipped(collected) == {"a": "it has more than 10 bytes"}


async def test_the_round_is_bounded_and_says_what_it_left(files: Tree, shelf: Shelf) -> None:
    for number in range(5):
        await files.write(f"output/display/{number}", b"x" * 10 + b"%d" % number)
    by_count = await collect(files, known={}, shelf=shelf, bounds=Bounds(files=2))
    assert (paths(by_count), list(skipped(by_count))) == (["0", "1"], ["2", "3", "4"])
    by_size = await collect(files, known={}, shelf=shelf, bounds=Bounds(total_bytes=35))
    assert (paths(by_size), list(skipped(by_size))) == (["0", "1", "2"], ["3", "4"])
    by_reading = await collect(files, known={}, shelf=shelf, bounds=Bounds(read_bytes=35))
    assert (paths(by_reading), list(skipped(by_reading))) == (["0", "1", "2"], ["3", "4"])
    # What was left comes next time, since it is not in the hashes.
    rest = await collect(files, known=by_count.hashes, shelf=shelf, bounds=Bounds(files=3))
    assert paths(rest) == ["2", "3", "4"]


async def test_a_crowd_of_files_ends_the_walk_and_forgets_nothing(files: Tree, shelf: Shelf) -> None:
    for number in range(8):
        await files.write(f"output/display/{number}", b"x")
    known = (await collect(files, known={}, shelf=shelf)).hashes
    collected = await collect(files, known=known, shelf=shelf, bounds=Bounds(entries=3))
    assert (collected.artifacts, collected.hashes) == ((), known)
    assert [one.reason for one in collected.skipped] == ["more than 3 files and folders are there"]


async def test_folders_too_deep_are_named(files: Tree, shelf: Shelf) -> None:
    await files.write("output/display/a/b/c/d", b"1")
    collected = await collect(files, known={}, shelf=shelf, bounds=Bounds(depth=3))
    assert (collected.artifacts, skipped(collected)) == ((), {"a/b/c": "it is too deep"})


async def test_so_many_are_left_that_only_some_are_named(files: Tree, shelf: Shelf, workspace: Path) -> None:
    await files.mkdir("output/display")
    for number in range(130):
        (workspace / f"output/display/{number}").symlink_to("/etc/passwd")
    collected = await collect(files, known={}, shelf=shelf)
    assert (len(collected.skipped), collected.unnamed) == (100, 30)


async def test_a_name_that_is_not_text_is_shown_as_escapes(files: Tree, shelf: Shelf, workspace: Path) -> None:
    await files.mkdir("output/display")
    Path(os.fsdecode(os.fsencode(workspace) + b"/output/display/\xff\xfe")).write_bytes(b"1")
    collected = await collect(files, known={}, shelf=shelf)
    (one,) = collected.skipped
    assert (one.path, one.reason) == (r'"output/display/\udcff\udcfe"', "its name is not text")


async def test_a_file_that_changes_while_it_is_read_has_the_hash_of_what_was_kept(shelf: Shelf) -> None:
    writer = "mkdir -p output/display; while :; do head -c 9000000 /dev/urandom | tee output/display/a > output/b; done"
    async with Sandbox.create() as sandbox:
        job = await sandbox.background(writer)
        seen: set[str] = set()
        async with asyncio.timeout(60):
            while len(seen) < 3:
                for artifact in (await collect(sandbox.files, known={}, shelf=shelf)).artifacts:
                    data = await kept(shelf, artifact.sha256)
                    assert (sha256(data).hexdigest(), len(data)) == (artifact.sha256, artifact.size)
                    seen.add(artifact.sha256)
        await job.kill()


async def test_a_lost_sandbox_is_not_taken_for_an_empty_one(shelf: Shelf) -> None:
    sandbox = await Sandbox.create()
    await sandbox.stop()
    with pytest.raises(SandboxLost):
        await collect(sandbox.files, known={}, shelf=shelf)


async def test_a_table_comes_with_its_head(files: Tree, shelf: Shelf) -> None:
    await files.write("output/display/t", "name,size\n" + "".join(f"n{row},{row}\n" for row in range(50)))
    (artifact,) = (await collect(files, known={}, shelf=shelf)).artifacts
    assert artifact.media_type == "text/csv"
    assert isinstance(artifact.preview, TablePreview)
    assert artifact.preview.rows[:2] == (("name", "size"), ("n0", "0"))
    assert (len(artifact.preview.rows), artifact.preview.more) == (10, True)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
async def test_an_image_comes_with_a_small_picture(form: str, files: Tree, shelf: Shelf) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (800, 400), (200, 30, 30)).save(buffer, form)
    await files.write("output/display/picture", buffer.getvalue())
    (artifact,) = (await collect(files, known={}, shelf=shelf)).artifacts
    assert isinstance(artifact.preview, ImagePreview)
    assert (artifact.preview.width, artifact.preview.height) == (256, 128)
    small = Image.open(io.BytesIO(await kept(shelf, artifact.preview.sha256)))
    assert (small.format, small.size) == ("PNG", (256, 128))
    colour = small.convert("RGB").getpixel((128, 64))
    assert isinstance(colour, tuple)
    assert all(abs(is_ - was) < 12 for is_, was in zip(colour, (200, 30, 30), strict=True))


async def test_pictures_are_bounded_in_number_and_size(files: Tree, shelf: Shelf) -> None:
    for number in range(3):
        buffer = io.BytesIO()
        Image.new("RGB", (10 + number, 10)).save(buffer, "PNG")
        await files.write(f"output/display/{number}", buffer.getvalue())
    one = await collect(files, known={}, shelf=shelf, bounds=Bounds(thumbnails=1))
    assert [artifact.preview is not None for artifact in one.artifacts] == [True, False, False]
    none = await collect(files, known={}, shelf=shelf, bounds=Bounds(image_bytes=10))
    assert [artifact.preview for artifact in none.artifacts] == [None, None, None]


async def test_the_shelf_keeps_equal_bytes_once_for_its_user_alone(shelf: Shelf) -> None:
    digests = {await shelf.put(b"bytes"), await shelf.put(b"bytes")}
    (digest,) = digests
    stored = [path for path in shelf.folder.rglob("*") if path.is_file()]
    assert stored == [shelf.folder / digest[:2] / digest]
    assert stat.S_IMODE(stored[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(stored[0].parent.stat().st_mode) == 0o700
    assert await shelf.size(digest) == 5
    await shelf.remove(digest)
    await shelf.remove(digest)
    with pytest.raises(NotFound):
        await kept(shelf, digest)


async def test_a_draft_that_is_not_kept_leaves_nothing(shelf: Shelf) -> None:
    async with shelf.draft() as draft:
        await draft.add(b"half")
    assert list(shelf.folder.iterdir()) == []


async def test_damage_on_the_shelf_is_noticed_and_mended_by_the_next_who_brings_it(shelf: Shelf) -> None:
    digest = await shelf.put(b"whole")
    shelf.place(digest).write_bytes(b"other")
    with pytest.raises(Corrupt):
        await kept(shelf, digest)
    await shelf.put(b"whole")
    assert await kept(shelf, digest) == b"whole"


@pytest.mark.parametrize("digest", ["", "..", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n", "a" * 65])
async def test_only_a_hash_is_looked_up(digest: str, shelf: Shelf) -> None:
    with pytest.raises(InvalidRequest):
        await kept(shelf, digest)
