"""What a file is gets told by its first bytes, and what is shown of it is clean and short."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image
from tests.sessions.packed import PACKERS, tarred, zipped

from skep.sessions.previews import TablePreview, TextPreview, preview
from skep.sessions.sniff import HEAD_BYTES, media_type
from skep.sessions.thumbnails import SIDE, read_png


def picture(form: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 3)).save(buffer, form)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "text/plain"),
        (b"plain words, and more of them\nwith a second line\n", "text/plain"),
        ("grüße\n".encode(), "text/plain"),
        ("grüße\n".encode("latin-1"), "text/plain"),
        ("grüße\n".encode("utf-16"), "text/plain"),
        (b"\x1b[31mred\x1b[0m\n", "text/plain"),
        (b"a,b\n1,2\n", "text/csv"),
        (b"a;b;c\n1;2;3\n", "text/csv"),
        (b'a,b\n"x,y",2\n', "text/csv"),
        (b"a\tb\n1\t2\n", "text/tab-separated-values"),
        (b'{"a": 1}', "application/json"),
        (b'\n [{"a": 1}]', "application/json"),
        (b"[1] a list of references\n", "text/plain"),
        (b"<!DOCTYPE html><p>x", "text/html"),
        (b"<!-- note --><html>", "text/html"),
        (b"<?xml version='1.0'?><a/>", "application/xml"),
        (b"<?xml version='1.0'?>\n<!-- x --><svg xmlns='y'/>", "image/svg+xml"),
        (b"<svg/>", "image/svg+xml"),
        (b"%PDF-1.7", "application/pdf"),
        (picture("PNG"), "image/png"),
        (picture("JPEG"), "image/jpeg"),
        (picture("GIF"), "image/gif"),
        (picture("WEBP"), "image/webp"),
        (picture("BMP"), "image/bmp"),
        (picture("TIFF"), "image/tiff"),
        (b"BM is how this sentence begins", "text/plain"),
        (b"MZ is how this sentence begins", "text/plain"),
        (zipped({"a": b"1"}), "application/zip"),
        (zipped({}), "application/zip"),
        (
            zipped({"[Content_Types].xml": b"", "xl/workbook.xml": b""}),
            "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
        ),
        (zipped({"mimetype": b"application/epub+zip", "a": b""}, 0), "application/epub+zip"),
        (tarred({"a": b"1"}), "application/x-tar"),
        (PACKERS[".tar.xz"](tarred({})), "application/x-xz"),
        (b"SQLite format 3\0" + bytes(80), "application/vnd.sqlite3"),
        (b"\0\1\2\3", "application/octet-stream"),
        (bytes(600), "application/octet-stream"),
    ],
)
def test_the_first_bytes_tell_the_type(data: bytes, kind: str) -> None:
    assert media_type(data) == kind


@given(some.binary(max_size=700))
def test_any_bytes_have_a_type_and_perhaps_a_preview(data: bytes) -> None:
    kind = media_type(data)
    assert "/" in kind
    preview(kind, data, whole=True)


@pytest.mark.parametrize("piece", ["<!-- -->", "<!DOCTYPE svg>", " \n", "<?xml?>", "[", '{"', '"a",', "a,\t;", "<!--"])
def test_text_made_to_be_tried_in_many_ways_is_told_at_once(piece: str) -> None:
    """It would take longer than the universe is old if the patterns tried every way."""
    data = (piece * HEAD_BYTES)[:HEAD_BYTES].encode()
    assert media_type(data).partition("/")[0] in ("text", "application", "image")


def test_a_character_cut_at_the_end_does_not_hide_a_text() -> None:
    head = ("ä" * HEAD_BYTES).encode()[: HEAD_BYTES - 1]
    assert media_type(head) == "text/plain"
    shown = preview("text/plain", head, whole=False)
    assert isinstance(shown, TextPreview)
    assert shown.lines[0].startswith("äää")


def test_a_text_shows_its_first_lines_without_control_characters() -> None:
    text = "one\x1b[31m red\x1b[0m\x07\n\x1b]0;title\x07two\u202eowt\r\nthree\tfour"
    assert preview("text/plain", text.encode(), whole=True) == TextPreview(
        ("one red", "twoowt", "three   four"), more=False
    )


def test_a_long_text_is_cut_in_both_directions() -> None:
    data = (("x" * 500 + "\n") * 100).encode()
    shown = preview("text/plain", data, whole=True)
    assert isinstance(shown, TextPreview)
    assert (len(shown.lines), {len(line) for line in shown.lines}, shown.more) == (20, {200}, True)


def test_a_wide_table_is_cut_in_both_directions() -> None:
    rows = [",".join(f"{'c' * 100}{column}" for column in range(60)) for _ in range(15)]
    shown = preview("text/csv", "\n".join(rows).encode(), whole=True)
    assert isinstance(shown, TablePreview)
    assert (len(shown.rows), len(shown.rows[0]), len(shown.rows[0][0]), shown.more) == (10, 20, 80, True)


def test_a_table_that_is_cut_off_loses_its_last_row_alone() -> None:
    shown = preview("text/csv", b"a,b\n1,2\n3,4\n5", whole=False)
    assert shown == TablePreview((("a", "b"), ("1", "2"), ("3", "4")), more=True)


def test_what_is_no_text_has_no_text_to_show() -> None:
    assert preview("application/octet-stream", b"\0\1", whole=True) is None
    assert preview("application/pdf", b"%PDF-1.7", whole=True) is None


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int = 10, height: int = 10, *, more: bytes = b"", after: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IDAT", b"") + chunk(b"IEND", b"") + after


def test_a_plain_small_png_is_taken() -> None:
    taken = read_png(png(SIDE, 7))
    assert taken is not None
    assert (taken.width, taken.height) == (SIDE, 7)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG\r\n\x1a\n",
        png(SIDE + 1, 1),
        png(1, 2**31),
        png(0, 1),
        png(more=chunk(b"tEXt", b"Comment\0<script>")),
        png(after=b"PK\3\4"),
        png()[:-1],
        png().replace(b"IHDR", b"IHDX"),
        png()[:30] + b"\xff" + png()[31:],
        b"GIF89a" + png(),
        png(more=chunk(b"IDAT", bytes(600_000))),
    ],
)
def test_anything_else_that_comes_back_is_not(data: bytes) -> None:
    assert read_png(data) is None
