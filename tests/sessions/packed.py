"""Archives for tests, well made and not."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping

import zstandard

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".tar": bytes,
    ".tar.gz": gzip.compress,
    ".tar.bz2": bz2.compress,
    ".tar.xz": lzma.compress,
    ".tar.zst": zstandard.compress,
}
KINDS = (".zip", *PACKERS)


def packed(kind: str, content: Mapping[str, bytes]) -> bytes:
    """Return an archive of that kind with these files; names that end in a slash are folders."""
    return zipped(content) if kind == ".zip" else PACKERS[kind](tarred(content))


def zipped(content: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return buffer.getvalue()


def zipped_as(name: str, data: bytes, mode: int) -> bytes:
    """Return a zip archive whose one entry says that it is of this mode."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo(name)
        info.create_system = 3
        info.external_attr = mode << 16
        archive.writestr(info, data)
    return buffer.getvalue()


def tarred(content: Mapping[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def tarred_as(*infos: tarfile.TarInfo, content: bytes = b"") -> bytes:
    """Return a tar archive of these entries; the regular ones have this content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info in infos:
            info.size = len(content) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, mode
    return info


def listed(name: bytes, offset: int, data: bytes, size: int, crc: int) -> bytes:
    """Return one line of a zip archive's list."""
    numbers = (20, 20, 0, 8, 0, 0, crc, len(data), size, len(name), 0, 0, 0, 0, 0, offset)
    return struct.pack("<4s6H3I5H2I", b"PK\1\2", *numbers) + name


def local(name: bytes, data: bytes, size: int, crc: int) -> bytes:
    """Return what stands before a file of a zip archive, and the file."""
    return struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 0, crc, len(data), size, len(name), 0) + name + data


def ended(files: bytes, directory: bytes, count: int) -> bytes:
    """Return a zip archive from its files and its list."""
    shown = min(count, 0xFFFF)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, shown, shown, len(directory), len(files), 0)
    if count < 0xFFFF:
        return files + directory + end
    place = len(files) + len(directory)
    large = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), len(files))
    return files + directory + large + struct.pack("<4sIQI", b"PK\6\7", 0, place, 1) + end


def overlapping(count: int, content: bytes) -> bytes:
    """Return a zip archive whose entries all lead to the same packed bytes."""
    data = deflated(content)
    file = local(b"f", data, len(content), zlib.crc32(content))
    lines = [listed(b"f%d" % number, 0, data, len(content), zlib.crc32(content)) for number in range(count)]
    return ended(file, b"".join(lines), count)


def crowded(count: int) -> bytes:
    """Return a zip archive that lists so many entries."""
    line = listed(b"f", 0, deflated(b""), 0, 0)
    return ended(local(b"f", deflated(b""), 0, 0), line * count, count)


def lying(content: bytes, told: int) -> bytes:
    """Return a zip archive that names another size for its file than what comes out of it."""
    data, crc = deflated(content), zlib.crc32(content)
    return ended(local(b"f", data, told, crc), listed(b"f", 0, data, told, crc), 1)


def deflated(content: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(content) + packer.flush()


def xz_with_dictionary(data: bytes, size_code: int) -> bytes:
    """Return what xz makes of the data, with a header that asks for a dictionary of another size."""
    whole = bytearray(lzma.compress(data))
    head = whole[12 : 12 + (whole[12] + 1) * 4]
    assert head[2:4] == b"\x21\x01"  # one filter, LZMA2, with one byte that tells the size
    head[4] = size_code
    head[-4:] = zlib.crc32(head[:-4]).to_bytes(4, "little")
    whole[12 : 12 + len(head)] = head
    return bytes(whole)
