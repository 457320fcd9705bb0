"""What the files that an agent leaves for its user can do to the host that collects them."""

from __future__ import annotations

import asyncio
import io
import mimetypes
import os
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from PIL import Image
from tests.attacks.attack import DEADLINE_S, SECRET, soon

from skep.sandbox.sandbox import Sandbox
from skep.sandbox.tree import Tree
from skep.sessions.artifacts import Bounds, Collected, collect
from skep.sessions.previews import ImagePreview, TextPreview
from skep.sessions.shelf import Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "home" / "artifacts")


def stored(shelf: Shelf) -> list[bytes]:
    return [path.read_bytes() for path in shelf.folder.rglob("*") if path.is_file()]


async def collected(files: Tree, shelf: Shelf, bounds: Bounds | None = None) -> Collected:
    async with asyncio.timeout(DEADLINE_S):
        return await collect(files, known={}, shelf=shelf, bounds=bounds)


@pytest.mark.parametrize("how", ["a link", "a relative link", "a link to its folder", "the folder", "the way there"])
async def test_no_link_brings_a_file_of_the_host(
    how: str, files: Tree, folder: Path, secret: Path, shelf: Shelf
) -> None:
    display = folder / "output/display"
    await files.mkdir("output/display" if how not in ("the folder", "the way there") else "empty")
    through = display / "trap"
    match how:
        case "a link":
            through.symlink_to(secret)
        case "a relative link":
            through.symlink_to(os.path.relpath(secret, display))
        case "a link to its folder":
            through.symlink_to(secret.parent)
            through /= "secret"
        case "the folder":
            display.parent.mkdir()
            display.symlink_to(secret.parent)
            through = display / "secret"
        case _:
            (secret.parent / "display").mkdir()
            secret.rename(secret.parent / "display/secret")
            display.parent.symlink_to(secret.parent)
            through = display / "secret"
    assert through.read_text() == SECRET
    found = await collected(files, shelf)
    assert (found.artifacts, stored(shelf)) == ((), [])
    assert len(found.skipped) == 1


async def test_links_that_come_and_go_bring_nothing_of_the_host(secret: Path, folder: Path, shelf: Shelf) -> None:
    """Swap files and folders for links to the host while they are collected."""
    swap = f"""
        mkdir -p output/display/sub; echo mine > output/display/sub/secret; echo mine > output/display/file
        while :; do
            ln -s {secret} l; mv -T l output/display/file; echo mine > f; mv -T f output/display/file
            mv output/display/sub s; ln -s {secret.parent} output/display/sub
            rm output/display/sub; mv s output/display/sub
        done
    """
    async with Sandbox.create(folder) as sandbox:
        assert isinstance(sandbox.files, Tree)
        job = await sandbox.background(swap)
        for _ in range(60):
            await collected(sandbox.files, shelf)
        await job.kill()
    assert set(stored(shelf)) <= {b"mine\n", b""}
    (folder / "trap").symlink_to(secret)
    assert (folder / "trap").read_text() == SECRET


class Swapped(Tree):
    """A workspace in which a link takes the place of each file at the worst moment."""

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        place = os.open(f"/proc/self/fd/{self.root_fd}/{path.rpartition('/')[0]}", os.O_PATH)
        os.unlink(path.rpartition("/")[2], dir_fd=place)
        os.symlink("../../private", path.rpartition("/")[2], dir_fd=place)
        os.close(place)
        async for piece in super().stream(path):
            yield piece


async def test_a_link_swapped_in_at_the_worst_moment_brings_nothing(folder: Path, shelf: Shelf) -> None:
    files = Swapped.at(str(folder))
    await files.write("private", b"mine alone")
    await files.write("output/display/file", b"for you")
    found = await collected(files, shelf)
    assert (found.artifacts, stored(shelf)) == ((), [])
    assert found.skipped[0].reason == "it is a link"
    assert (folder / "output/display/file").read_bytes() == b"mine alone"
    files.close()


async def test_a_pipe_does_not_hold_the_collector(files: Tree, folder: Path, shelf: Shelf) -> None:
    await files.write("output/display/z", b"last")
    pipe = folder / "output/display/pipe"
    os.mkfifo(pipe)
    naive = threading.Thread(target=pipe.read_bytes, daemon=True)
    naive.start()
    writer = await _opened(pipe)  # which works only while somebody waits to read
    found = await collected(files, shelf)
    assert [artifact.path for artifact in found.artifacts] == ["output/display/z"]
    os.close(writer)
    naive.join(DEADLINE_S)


async def _opened(pipe: Path) -> int:
    opened: list[int] = []

    def tried() -> bool:
        try:
            opened.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    assert await soon(tried, DEADLINE_S)
    return opened[0]


async def test_a_file_larger_than_any_disk_is_not_read(files: Tree, folder: Path, shelf: Shelf) -> None:
    await files.write("output/display/huge", b"")
    with (folder / "output/display/huge").open("r+b") as file:
        file.truncate(1 << 42)
    there = (folder / "output/display/huge").stat()
    assert (there.st_size, there.st_blocks) == (1 << 42, 0)
    found = await collected(files, shelf)
    assert (found.artifacts, stored(shelf)) == ((), [])
    assert "more than" in found.skipped[0].reason


async def test_a_crowd_of_holes_is_not_read_without_end(files: Tree, folder: Path, shelf: Shelf) -> None:
    await files.mkdir("output/display")
    for number in range(50):
        with (folder / f"output/display/{number}").open("wb") as file:
            file.truncate(4 << 20)
    found = await collected(files, shelf, Bounds(read_bytes=20 << 20))
    assert (len(found.artifacts), len(found.skipped)) == (5, 45)


async def test_a_file_that_grows_is_left_at_the_bound(folder: Path, shelf: Shelf) -> None:
    """Append for as long as it is read: a look at the size before does not bound the reading."""
    grow = "mkdir -p output/display && exec yes xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx >> output/display/grows"
    bound = 24 << 20
    async with Sandbox.create(folder) as sandbox:
        assert isinstance(sandbox.files, Tree)
        job = await sandbox.background(grow)
        there = folder / "output/display/grows"
        assert await soon(lambda: there.exists() and there.stat().st_size > 0, DEADLINE_S)
        found = await collected(sandbox.files, shelf, Bounds(file_bytes=bound))
        assert await soon(lambda: there.stat().st_size > bound, DEADLINE_S)
        again = await collected(sandbox.files, shelf, Bounds(file_bytes=bound))
        await job.kill()
    assert all(artifact.size <= bound for artifact in found.artifacts)
    assert (again.artifacts, len(again.skipped)) == ((), 1)


async def test_a_name_does_not_write_to_a_terminal_or_lead_elsewhere(files: Tree, shelf: Shelf) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\u202egnp.exe\n"
    await files.write(f"output/display/{hostile}", b"1")
    (artifact,) = (await collected(files, shelf)).artifacts
    assert "\x1b" in artifact.path  # where it is; for people there is the name
    assert artifact.name == "]0;owned[2Jgnp.exe"
    assert artifact.name.isprintable()


async def test_a_text_does_not_write_to_a_terminal(files: Tree, shelf: Shelf) -> None:
    await files.write("output/display/a", "\x1b]0;owned\x07\x1b[2J\x9b31mred\u202e\n")
    (artifact,) = (await collected(files, shelf)).artifacts
    assert isinstance(artifact.preview, TextPreview)
    assert artifact.preview.lines == ("31mred",)


async def test_a_page_is_not_taken_for_a_picture_by_its_name(files: Tree, shelf: Shelf) -> None:
    await files.write("output/display/a.png", b"<!doctype html><script>steal()</script>")
    (artifact,) = (await collected(files, shelf)).artifacts
    assert mimetypes.guess_type(artifact.name)[0] == "image/png"
    assert artifact.media_type == "text/html"


def bomb(side: int) -> bytes:
    """Return a small PNG with so many black pixels in each direction."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer = zlib.compressobj(9)
    row = bytes(1 + side // 8)
    body = b"".join([*(packer.compress(row) for _ in range(side)), packer.flush()])
    head = struct.pack(">2I5B", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


UNLIMITED = """
import resource, sys
from PIL import Image
Image.MAX_IMAGE_PIXELS = None
resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))
try:
    Image.open(sys.argv[1]).load()
except MemoryError:
    print("out of memory")
"""


async def test_a_picture_that_unpacks_to_gigabytes_has_no_small_one(files: Tree, shelf: Shelf, tmp_path: Path) -> None:
    data = bomb(30_000)
    (tmp_path / "bomb").write_bytes(data)
    assert len(data) < 200_000
    control = [sys.executable, "-c", UNLIMITED, os.fspath(tmp_path / "bomb")]
    ran = subprocess.run(control, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "out of memory\n", ran.stderr
    await files.write("output/display/bomb.png", data)
    await files.write("output/display/large.png", bomb(8000))
    await files.write("output/display/fair.png", bomb(7000))
    found = await collected(files, shelf)
    looks = {artifact.name: artifact.preview for artifact in found.artifacts}
    assert (looks["bomb.png"], looks["large.png"]) == (None, None)
    assert isinstance(looks["fair.png"], ImagePreview)


@pytest.mark.parametrize("cut", [9, 30, 60, 500])
async def test_a_damaged_picture_is_delivered_without_a_small_one(cut: int, files: Tree, shelf: Shelf) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((90, 90), 50).save(buffer, "PNG")
    await files.write("output/display/cut", buffer.getvalue()[:cut])
    (artifact,) = (await collected(files, shelf)).artifacts
    assert (artifact.media_type, artifact.preview) == ("image/png", None)


def test_no_picture_is_decoded_by_the_process_that_collects(tmp_path: Path) -> None:
    """Without a sandbox the decoder would be here: it is in the sandbox alone."""
    buffer = io.BytesIO()
    Image.new("RGB", (30, 30)).save(buffer, "PNG")
    (tmp_path / "image").write_bytes(buffer.getvalue())
    program = """
import asyncio, sys
from pathlib import Path
from skep.sessions.thumbnails import thumbnail

async def image():
    yield Path(sys.argv[1]).read_bytes()

made = asyncio.run(thumbnail(image(), "image/png"))
maps = Path("/proc/self/maps").read_text()
print(made is not None, "PIL" in sys.modules, "_imaging" in maps)
import PIL.Image
print("PIL" in sys.modules, "_imaging" in Path("/proc/self/maps").read_text())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "image"], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.splitlines() == ["True False False", "True True"], ran.stderr


async def test_a_hijacked_decoder_finds_nothing_to_take_and_nobody_to_tell(secret: Path) -> None:
    """Run something else in the decoder's place: it sees neither the host's files nor its network."""
    from skep.sessions import thumbnails

    hijacked = f"""
import os, socket
for attempt in (lambda: open({str(secret)!r}).read(), lambda: socket.create_connection(("127.0.0.1", 1), 1),
                lambda: open(os.__file__, "a")):
    try:
        attempt()
    except OSError:
        continue
    print("THROUGH")
print("DONE")
"""
    ran = subprocess.run([sys.executable, "-c", f"print(open({str(secret)!r}).read())"], capture_output=True, text=True)
    assert SECRET in ran.stdout
    shown = thumbnails._shown()
    assert shown is not None
    async with Sandbox.create(limits=thumbnails._LIMITS, read_only=shown) as sandbox:
        held = await sandbox.run([thumbnails._python(), "-I", "-S", "-c", hijacked])
    assert held.text == "DONE\n", held.error_text
