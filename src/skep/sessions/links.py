"""Signed links to a port of a session's sandbox, good for a short while.

A link is a note that this Skep once allowed a look at one port of one session until a certain time. It says nothing
about who holds it: whoever has it can look, so it is made anew on demand and must never stand for a person, an account
or a right to anything else.
"""

from __future__ import annotations

import base64
import errno
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from skep.errors import Corrupt, Denied, InvalidRequest, StorageFull, Unavailable

MAX_TTL_S = 24 * 3600.0
_KEY_BYTES = 32
_TOKEN_CHARACTERS = 1024
_SESSION_CHARACTERS = 200
#: Bound into the key, so that nothing signed with it for another purpose can pass for a link.
_PURPOSE = b"skep preview link 1"


@dataclass(frozen=True, slots=True)
class Link:
    """What a valid token allows: a look at this port, until then."""

    session_id: str
    port: int
    expires_at: float


class Links:
    """Make and read links with one key."""

    def __init__(self, key: bytes) -> None:
        if len(key) < _KEY_BYTES:
            raise InvalidRequest(f"a key of {len(key)} bytes is too short", hint=f"give {_KEY_BYTES} random bytes")
        self._key = hmac.digest(key, _PURPOSE, "sha256")

    @classmethod
    def open(cls, path: Path) -> Links:
        """Load the key at `path`, or make one there, for this user alone."""
        with _explained(path):
            if not path.exists():
                _create_key(path)
            return cls(_load_key(path))

    def make(self, session_id: str, port: int, *, ttl_s: float, now: float) -> str:
        """Return a token for a port, good for `ttl_s` seconds from `now` (seconds since 1970), a day at most."""
        if not 0 < port < 65536:
            raise InvalidRequest(f"there is no port {port}", hint="give one from 1 to 65535")
        if not 0 < len(session_id) <= _SESSION_CHARACTERS:
            raise InvalidRequest("a session's id has from 1 to 200 characters", hint="give the id of a session")
        if not 0 < ttl_s <= MAX_TTL_S:
            raise InvalidRequest(
                f"a link cannot be good for {ttl_s} s", hint=f"give more than 0 and up to {MAX_TTL_S:g}"
            )
        body = json.dumps([session_id, port, now + ttl_s], separators=(",", ":")).encode()
        text = _encoded(body)
        return f"{text}.{self._signature(text)}"

    def read(self, token: str, now: float, *, session_id: str | None = None, port: int | None = None) -> Link:
        """Return what a token allows; `Denied` if it is forged, too old, or for another session or port."""
        text, _, signature = token.partition(".")
        # Texts are compared, not what they decode to, so that each link has one form.
        if len(token) > _TOKEN_CHARACTERS or not hmac.compare_digest(_plain(signature), _plain(self._signature(text))):
            raise Denied("the preview link is not valid", hint="ask for a new link")
        link = Link(*json.loads(_decoded(text)))
        if not now < link.expires_at:
            raise Denied("the preview link has expired", hint="ask for a new link")
        if (session_id is not None and link.session_id != session_id) or (port is not None and link.port != port):
            raise Denied("the preview link is for another port", hint="ask for a link to this port")
        return link

    def _signature(self, text: str) -> str:
        return _encoded(hmac.digest(self._key, _plain(text), "sha256"))


def _plain(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _create_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as stream:
            stream.write(secrets.token_bytes(_KEY_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        # A link never replaces: of two processes that start at once, one key wins and both use it.
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        fresh.unlink()


def _load_key(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as stream:
        found = os.fstat(stream.fileno())
        key = stream.read(_KEY_BYTES + 1)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 or found.st_uid != os.geteuid():
        raise Denied(f"others may read the key {path} (mode {mode:04o})", hint=f"chmod 600 {path}")
    if len(key) != _KEY_BYTES:
        raise Corrupt(f"{path} is not a key of {_KEY_BYTES} bytes", hint="remove it; links made with it end then")
    return key


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no room is left for {path}", hint="free some space and try again") from error
        raise Unavailable(f"{path}: {error.strerror}", hint="check that the folder is yours to write") from error
