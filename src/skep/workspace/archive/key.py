"""The key of archives: one secret of 32 bytes, from which all others follow."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from skep.errors import ConfigInvalid, Denied, NotFound
from skep.workspace.archive.folder import sync_folder

KEY_BYTES = 32
_HINT = "give the 32 bytes that the key was made of, as Skep wrote them"


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """The three uses of a key: to encrypt, to name chunks by their content, and to be told from other keys."""

    sealing: bytes
    naming: bytes
    id: bytes

    @classmethod
    def of(cls, secret: bytes) -> Key:
        if len(secret) != KEY_BYTES:
            raise ConfigInvalid(f"a key of archives has {KEY_BYTES} bytes, this one {len(secret)}", hint=_HINT)
        return cls(_derived(secret, b"sealing"), _derived(secret, b"naming"), _derived(secret, b"id")[:8])

    def name(self, plain: bytes) -> str:
        """Name a chunk by its content, so that nobody without the key can tell what it holds."""
        return hmac.new(self.naming, plain, "sha256").hexdigest()


def _derived(secret: bytes, use: bytes) -> bytes:
    return HKDFExpand(algorithm=SHA256(), length=KEY_BYTES, info=b"skep archive " + use).derive(secret)


def load_key(path: Path) -> bytes:
    """Read a key from its file, which nobody else may read."""
    try:
        with path.open("rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(KEY_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(
            f"there is no key of archives at {path}", hint="put the key there, or save a first archive"
        ) from None
    if mode & 0o077:
        raise Denied(f"other users may read the key of archives at {path}", hint=f"chmod 600 {path}")
    if len(secret) != KEY_BYTES:
        raise ConfigInvalid(f"{path} does not hold a key of {KEY_BYTES} bytes", hint=_HINT)
    return secret


def ensure_key(path: Path) -> bytes:
    """Read a key, or make it if there is none yet. Of two that make one at the same time, both get the first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        _make(path)
    return load_key(path)


def _make(path: Path) -> None:
    # It appears by a link: complete, and never in the place of another.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink()
    sync_folder(path.parent)
