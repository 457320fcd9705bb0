"""Seal what goes into a store: compressed by zstd, then encrypted with AES-256-GCM.

A sealed object is a header in the clear (magic, format, id of the key, nonce), then the ciphertext with its tag. The
header and the object's name are authenticated with it, so an object under another name does not open. Nonces are
random: one key may seal some 2^32 objects, petabytes of chunks.
"""

from __future__ import annotations

import os
import struct
import threading

import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from skep.errors import ArchiveDamaged, ArchiveTooNew
from skep.workspace.archive.key import Key

FORMAT = 1
#: More than any object holds when it is opened: a guard, not a limit on files.
LARGEST = 1 << 30
#: An object that is there is not stored again, so one that is damaged has to go first.
DAMAGE_HINT = "restore an older version; or remove this object from the store and save the workspace again"
_MAGIC = b"SKEP"
_HEADER = struct.Struct(">4sI8s12s")
SMALLEST = _HEADER.size + 16
_LEVEL = 3


class Cipher:
    """Seals and opens objects. May be used by several threads."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self._aead = AESGCM(key.sealing)
        self._local = threading.local()

    def seal(self, plain: bytes, name: str) -> bytearray:
        header = _HEADER.pack(_MAGIC, FORMAT, self.key.id, os.urandom(12))
        packed = self._compressor().compress(plain)
        sealed = bytearray(len(packed) + SMALLEST)
        sealed[: len(header)] = header
        # In place: to put header and ciphertext together would copy megabytes under the interpreter's lock.
        self._aead.encrypt_into(header[-12:], packed, header + name.encode(), memoryview(sealed)[len(header) :])
        return sealed

    def open(self, sealed: bytes, name: str) -> bytes:
        """Return what was sealed under this name; ArchiveDamaged or ArchiveTooNew if it cannot be."""
        header, body = sealed[: _HEADER.size], memoryview(sealed)[_HEADER.size :]
        self._check(header, name)
        try:
            packed = self._aead.decrypt(header[-12:], body, header + name.encode())
            return self._unpacked(packed, name)
        except InvalidTag:
            raise _damaged(name, "is cut, altered or in the place of another") from None
        except zstandard.ZstdError as error:
            raise _damaged(name, f"does not unpack: {error}") from error

    def _check(self, header: bytes, name: str) -> None:
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise _damaged(name, "is not an object that Skep wrote")
        _, version, key_id, _ = _HEADER.unpack(header)
        if version > FORMAT:
            raise ArchiveTooNew(
                f"{name} has format {version}, this Skep reads up to {FORMAT}", hint="restore it with a newer Skep"
            )
        if key_id != self.key.id:
            raise ArchiveDamaged(
                f"{name} was sealed with the key {key_id.hex()}, not with this one ({self.key.id.hex()})",
                hint="restore with the key that the archive was saved with",
            )

    def _unpacked(self, packed: bytes, name: str) -> bytes:
        if not 0 <= zstandard.frame_content_size(packed) <= LARGEST:
            raise _damaged(name, "claims an impossible size")
        return self._decompressor().decompress(packed)

    def _compressor(self) -> zstandard.ZstdCompressor:
        if not hasattr(self._local, "compressor"):
            self._local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        compressor: zstandard.ZstdCompressor = self._local.compressor
        return compressor

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if not hasattr(self._local, "decompressor"):
            self._local.decompressor = zstandard.ZstdDecompressor()
        decompressor: zstandard.ZstdDecompressor = self._local.decompressor
        return decompressor


def _damaged(name: str, what: str) -> ArchiveDamaged:
    return ArchiveDamaged(f"{name} {what}", hint=DAMAGE_HINT)
