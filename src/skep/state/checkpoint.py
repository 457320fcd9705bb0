"""Signed checkpoints: they make a log that was cut short or rewritten as a whole visible.

Whoever may write the database can cut the end off a hash chain, or compute every hash anew. A checkpoint
states, under an Ed25519 signature, which hash a hive's log had at which sequence number. It is kept in the
database and, the newest of each hive, in a file beside the key, so that deleting checkpoints from the
database hides nothing. What came after the newest checkpoint is not covered yet.

    keys/events.pem                      the private key, mode 0600
    keys/checkpoints/<hive id>.json      the newest checkpoint of that hive
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skep.errors import Corrupt, Denied, StorageFull, Unavailable
from skep.state.record import canonical, check_id, is_id


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A signed statement that the log of a hive had this hash at this sequence number."""

    hive_id: str
    seq: int
    hash: bytes
    at: str
    key_id: str
    signature: bytes

    def statement(self) -> bytes:
        """Return the bytes under the signature."""
        return _statement(self.hive_id, self.seq, self.hash, at=self.at, key_id=self.key_id)

    def as_json(self) -> dict[str, Any]:
        return {
            "hive": self.hive_id,
            "seq": self.seq,
            "hash": self.hash.hex(),
            "at": self.at,
            "key": self.key_id,
            "signature": self.signature.hex(),
        }


class Signer:
    """The key that signs checkpoints, and the files beside it that hold the newest of each hive."""

    def __init__(self, key: Ed25519PrivateKey, anchors: Anchors) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.key_id = key_id(self.public_key)
        self.anchors = anchors

    @classmethod
    def open(cls, path: Path, *, anchors: Path | None = None) -> Signer:
        """Load the key at `path`, or make one there.

        Checkpoints go to the folder `anchors`, or to `checkpoints` beside the key. Two databases that share a
        key need a folder each, or the logs of the one are missed in the other.
        """
        with _disk_errors(path):
            if not path.exists():
                _create_key(path)
            key = _load_key(path)
        return cls(key, Anchors(anchors or path.parent / "checkpoints"))

    def sign(self, hive_id: str, seq: int, hash_: bytes, *, at: str) -> Checkpoint:
        statement = _statement(hive_id, seq, hash_, at=at, key_id=self.key_id)
        return Checkpoint(hive_id, seq, hash_, at, self.key_id, self._key.sign(statement))

    def vouches_for(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.key_id == self.key_id and is_signed(checkpoint, self.public_key)


class Anchors:
    """The newest checkpoint of each hive, one file each, replaced as a whole under a lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def hive_ids(self) -> list[str]:
        return sorted(file.stem for file in self.folder.glob("*.json") if is_id(file.stem))

    def newest(self, hive_id: str) -> Checkpoint | None:
        with _disk_errors(self.folder):
            try:
                text = self._file(hive_id).read_bytes()
            except FileNotFoundError:
                return None
        return read_checkpoint(text, where=str(self._file(hive_id)))

    def store(self, checkpoint: Checkpoint) -> None:
        """Replace the hive's checkpoint, unless the file already holds a newer one."""
        with _disk_errors(self.folder), self._locked():
            known = self.newest(checkpoint.hive_id)
            if known is None or known.seq < checkpoint.seq:
                _replace(self._file(checkpoint.hive_id), canonical(checkpoint.as_json()) + b"\n")

    def set_aside(self, suffix: str) -> Path | None:
        """Move all checkpoints out of the way, yet keep them, when an older log is restored on purpose."""
        if not self.folder.exists():
            return None
        return self.folder.rename(self.folder.with_name(f"{self.folder.name}.{suffix}"))

    def _file(self, hive_id: str) -> Path:
        return self.folder / f"{check_id('hive_id', hive_id)}.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Several processes may share the key; closing the descriptor gives the lock up.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    hive: str
    seq: int = Field(ge=1)
    hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    at: str
    key: str
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")


def read_checkpoint(text: bytes | str, *, where: str) -> Checkpoint:
    """Read one checkpoint from JSON; its signature is not looked at."""
    try:
        stored = _Stored.model_validate_json(text)
    except ValidationError as error:
        raise Corrupt(
            f"{where} does not hold a checkpoint", hint="keep the file as evidence and look who changed it"
        ) from error
    return Checkpoint(
        hive_id=stored.hive,
        seq=stored.seq,
        hash=bytes.fromhex(stored.hash),
        at=stored.at,
        key_id=stored.key,
        signature=bytes.fromhex(stored.signature),
    )


def key_id(public_key: bytes) -> str:
    return sha256(public_key).hexdigest()[:16]


def is_signed(checkpoint: Checkpoint, public_key: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(checkpoint.signature, checkpoint.statement())
    except InvalidSignature:
        return False
    return True


def _statement(hive_id: str, seq: int, hash_: bytes, *, at: str, key_id: str) -> bytes:
    return canonical(
        {"at": at, "hash": hash_.hex(), "hive": hive_id, "key": key_id, "seq": seq, "type": "skep checkpoint"}
    )


@contextmanager
def _disk_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no room left for {place}", hint="free some space and try again") from error
        raise Unavailable(
            f"{place}: {error.strerror}", hint="check that the folder exists and is yours to write"
        ) from error


def _create_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    fresh = path.with_name(f".{path.name}.{token_hex(8)}")
    _write_durably(fresh, pem)
    try:
        # A link never replaces: of two processes that start at once, one key wins and both use it.
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        fresh.unlink()


def _load_key(path: Path) -> Ed25519PrivateKey:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise Denied(f"others may read the signing key {path} (mode {mode:04o})", hint=f"chmod 600 {path}")
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{path} is not a private key", hint="restore it from a backup") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise Corrupt(f"{path} is not an Ed25519 key", hint="restore it from a backup")
    return key


def _replace(file: Path, content: bytes) -> None:
    fresh = file.with_name(f".{file.name}.{token_hex(8)}")
    _write_durably(fresh, content)
    fresh.replace(file)
    descriptor = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_durably(file: Path, content: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
