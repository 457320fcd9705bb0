"""Small pictures of images that an agent made.

Decoders of images have a long record of holes, so no image is ever parsed in this process. Each is decoded by Pillow
in a sandbox of its own, which has no network, little memory and nothing to find but a Python and Pillow, and which is
thrown away. What comes back is taken for an image only if it is a plain PNG of the size that was asked for.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import AsyncIterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from skep.errors import SkepError
from skep.sandbox.limits import MIB, CommandLimits, Limits
from skep.sandbox.sandbox import Sandbox

SIDE = 256
#: The types that are decoded, and what Pillow calls them; any other decoder is left out of it.
FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/gif": "GIF",
    "image/webp": "WEBP",
    "image/bmp": "BMP",
    "image/tiff": "TIFF",
}
_PIXELS = 50_000_000
_PNG_BYTES = 512 << 10
_SECONDS = 15.0
_LIMITS = Limits(
    cpus=1.0,
    memory_bytes=512 * MIB,
    disk_bytes=64 * MIB,
    inodes=1000,
    processes=16,
    open_files=64,
    tmp_bytes=MIB,
    cache_bytes=MIB,
    shm_bytes=MIB,
    output_bytes=_PNG_BYTES,
    command_s=_SECONDS,
    command_cap_s=_SECONDS,
)
_PACKAGES = "/opt/skep/previews"
_PROGRAM = """
import sys, warnings
sys.path.append(sys.argv[1])
from PIL import Image, ImageOps
side, Image.MAX_IMAGE_PIXELS = int(sys.argv[3]), int(sys.argv[4])
warnings.simplefilter("error", Image.DecompressionBombWarning)
with Image.open("/workspace/image", formats=[sys.argv[2]]) as image:
    image.draft("RGB", (side, side))
    image.thumbnail((4 * side, 4 * side), Image.Resampling.NEAREST)
    small = ImageOps.exif_transpose(image).convert("RGBA")
small.thumbnail((side, side))
small.save(sys.stdout.buffer, "PNG")
"""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHUNKS = (b"IHDR", b"IDAT", b"IEND")


@dataclass(frozen=True, slots=True)
class Thumbnail:
    png: bytes
    width: int
    height: int


async def thumbnail(image: AsyncIterable[bytes], media_type: str) -> Thumbnail | None:
    """Make a small picture; None if the image is none, is too large, or if there is no Pillow."""
    shown = _shown()
    if media_type not in FORMATS or shown is None:
        return None
    argv = [_python(), "-I", "-S", "-c", _PROGRAM, _PACKAGES, FORMATS[media_type], str(SIDE), str(_PIXELS)]
    try:
        async with Sandbox.create(limits=_LIMITS, read_only=shown) as sandbox:
            await sandbox.files.write("image", image)
            made = await sandbox.run(argv, limits=CommandLimits(cpu_s=int(_SECONDS)))
    except SkepError:  # a picture less is no reason to keep the artifact back
        return None
    return read_png(made.stdout) if made.ok and not made.truncated else None


def read_png(data: bytes) -> Thumbnail | None:
    """Take bytes for a small picture only if they are a PNG of at most that size, and nothing more."""
    chunks = list(_chunks(data))
    if [kind for kind, _ in chunks[:1]] != [b"IHDR"] or [kind for kind, _ in chunks[-1:]] != [b"IEND"]:
        return None
    if any(kind not in _CHUNKS for kind, _ in chunks) or len(chunks[0][1]) != 13 or chunks[-1][1]:
        return None
    width, height = struct.unpack(">2I", chunks[0][1][:8])
    whole = len(_SIGNATURE) + sum(12 + len(body) for _, body in chunks) == len(data)
    return Thumbnail(data, width, height) if whole and 0 < width <= SIDE and 0 < height <= SIDE else None


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks of a PNG up to the first that is none."""
    at = len(_SIGNATURE) if data.startswith(_SIGNATURE) and len(data) <= _PNG_BYTES else len(data)
    while len(data) - at >= 12:
        length, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        if len(data) - at < 12 + length or zlib.crc32(kind + body) != int.from_bytes(
            data[at + 8 + length :][:4], "big"
        ):
            return
        yield kind, body
        at += 12 + length


def _python() -> str:
    """Return the interpreter itself: that of a virtual environment is a link to it."""
    return os.path.realpath(sys.executable)


def _shown() -> dict[str, str] | None:
    """Return what of this machine the sandbox needs to see: the interpreter at its own path, and Pillow."""
    pillow = find_spec("PIL")  # does not import it
    if pillow is None or pillow.origin is None:
        return None
    package = Path(pillow.origin).parent
    shown = {str(package): f"{_PACKAGES}/PIL"}
    libraries = package.with_name("pillow.libs")
    if libraries.is_dir():
        shown[str(libraries)] = f"{_PACKAGES}/pillow.libs"
    home = os.path.realpath(sys.base_prefix)
    if not home.startswith("/usr"):  # which every sandbox sees
        shown[home] = home
    return shown
