"""What a file is, told by its first bytes. Its name is somebody's claim and is not looked at."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence

#: As much of a file's beginning as is looked at.
HEAD_BYTES = 64 << 10
UNKNOWN = "application/octet-stream"
_ROWS = 20

_SIGNATURES: Sequence[tuple[bytes, str]] = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"%PDF-", "application/pdf"),
    (b"PK\5\6", "application/zip"),
    (b"\x1f\x8b\x08", "application/gzip"),
    (b"BZh", "application/x-bzip2"),
    (b"\xfd7zXZ\0", "application/x-xz"),
    (b"\x28\xb5\x2f\xfd", "application/zstd"),
    (b"7z\xbc\xaf\x27\x1c", "application/x-7z-compressed"),
    (b"Rar!\x1a\x07", "application/vnd.rar"),
    (b"\x7fELF", "application/x-elf"),
    (b"\0asm", "application/wasm"),
    (b"PAR1", "application/vnd.apache.parquet"),
    (b"SQLite format 3\0", "application/vnd.sqlite3"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"\x1aE\xdf\xa3", "video/webm"),
    (b"wOF2", "font/woff2"),
    (b"wOFF", "font/woff"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BRANDS = {b"avif": "image/avif", b"heic": "image/heic", b"M4A ": "audio/mp4", b"qt  ": "video/quicktime"}
_OFFICE = "application/vnd.openxmlformats-officedocument."
_PARTS = {
    b"word/": _OFFICE + "wordprocessingml.document",
    b"xl/": _OFFICE + "spreadsheetml.sheet",
    b"ppt/": _OFFICE + "presentationml.presentation",
}
_OPEN_DOCUMENT = re.compile(
    rb"PK\x03\x04.{22}\x08\x00\x00\x00mimetype(application/[\w.+-]{1,80}?)PK[\x01\x03\x07]", re.DOTALL
)
# Possessive, because a text may be made to be tried in endlessly many ways.
_HTML = re.compile(r"\s*+(?:<!--(?>.*?-->)\s*+)*+<(?:!doctype html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
_XML = re.compile(r"\s*+<\?xml\b")
_SVG = re.compile(
    r"\s*+(?:<\?xml[^>]{0,200}+>\s*+)?+(?:<!--(?>.*?-->)\s*+|<!DOCTYPE svg[^>]{0,400}+>\s*+)*+<svg\b", re.DOTALL
)
_JSON = re.compile(r'\s*+(?:\{\s*(?:"[^"\n]{0,400}"\s*:|\}\s*$)|\[\s*(?:[{"\[]|-?\d+(?:\.\d+)?\s*(?:,|\]\s*$)))')
#: Control characters that no text has.
_BINARY = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")


def media_type(head: bytes) -> str:
    """Name the type of a file that begins so."""
    for signature, name in _SIGNATURES:
        if head.startswith(signature):
            return name
    return _by_structure(head) or _by_text(head) or UNKNOWN


def text_of(head: bytes) -> str | None:
    """Return the beginning of a text as characters; None if it is no text."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = head[: len(head) & ~1].decode("utf-16", errors="replace")
        return None if _BINARY.search(text.encode(errors="replace")) else text
    if _BINARY.search(head):
        return None
    # The last character may be cut in the middle.
    end = next((back for back in range(1, 4) if len(head) >= back and head[-back] >= 0xC0), 0)
    for kept in (head, head[: len(head) - end]):
        try:
            return kept.decode("utf-8-sig")
        except UnicodeDecodeError:
            continue
    return head.decode("cp1252", errors="replace")


def table_of(text: str, *, whole: bool) -> tuple[str, list[list[str]]] | None:
    """Return the delimiter and the first rows of a table in text; None if it is none."""
    lines = text.splitlines(keepends=True)
    if not whole:
        lines = lines[:-1]
    for delimiter in "\t,;":
        rows = _rows(lines, delimiter)
        if len(rows) > 1 and len(rows[0]) > 1 and all(rows[0]) and len({len(row) for row in rows}) == 1:
            return delimiter, rows
    return None


def _rows(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    if not lines or delimiter not in lines[0]:
        return []
    try:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        return [row for _, row in zip(range(_ROWS), reader, strict=False) if row]
    except csv.Error:
        return []


def is_tar(head: bytes) -> bool:
    """Say whether a block is a tar header: its sum is right, which other bytes do not have by chance."""
    block = head[:512]
    if len(block) < 512 or not block[0]:
        return False
    try:
        told = int(block[148:156].strip(b" \0") or b"-", 8)
    except ValueError:
        return False
    return told == sum(block) - sum(block[148:156]) + 8 * ord(" ")


def _by_structure(head: bytes) -> str | None:
    if head.startswith(b"PK\3\4"):
        return _zip_type(head)
    if head.startswith(b"RIFF") and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], "video/mp4")
    if head.startswith(b"BM") and head[6:10] == b"\0\0\0\0":
        return "image/bmp"
    if head.startswith(b"MZ") and _BINARY.search(head):
        return "application/vnd.microsoft.portable-executable"
    return "application/x-tar" if is_tar(head) else None


def _zip_type(head: bytes) -> str:
    """Tell a document that is packed as a zip archive from an archive; names stand in the clear."""
    if found := _OPEN_DOCUMENT.match(head):
        return found[1].decode("ascii")
    if b"[Content_Types].xml" in head:
        return next((name for part, name in _PARTS.items() if part in head), "application/zip")
    return "application/zip"


def _by_text(head: bytes) -> str | None:
    text = text_of(head)
    if text is None or not head:
        return None if head else "text/plain"
    if _SVG.match(text):
        return "image/svg+xml"
    if _HTML.match(text):
        return "text/html"
    if _XML.match(text):
        return "application/xml"
    if _JSON.match(text):
        return "application/json"
    if table := table_of(text, whole=len(head) < HEAD_BYTES):
        return "text/tab-separated-values" if table[0] == "\t" else "text/csv"
    return "text/plain"
