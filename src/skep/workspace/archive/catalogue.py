"""The indexes in a store: which archives and snapshots there are, and what each needs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, unquote

from skep.errors import InvalidRequest, NotFound
from skep.workspace.archive.cipher import Cipher
from skep.workspace.archive.index import Index, decode_index
from skep.workspace.archive.objects import Store

ARCHIVES, SNAPSHOTS = "archives/", "snapshots/"
_VERSION = re.compile(r"(?P<number>\d{8})-(?P<when>\d{8}T\d{6}Z)-[0-9a-f]{8}")
_WHEN = "%Y%m%dT%H%M%SZ"
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Version:
    """One archive of a workspace, as listed."""

    name: str
    version: str
    saved_at: datetime


class Catalogue:
    """Reads and writes indexes. Each is sealed for its own place, so one put in the place of another does not open."""

    def __init__(self, store: Store, cipher: Cipher) -> None:
        self._store = store
        self._cipher = cipher

    def write(self, address: str, index: Index) -> None:
        """Write an index when everything it needs is safe; it is safe itself when this returns."""
        self._store.settle()
        self._store.put(address, self._cipher.seal(index.model_dump_json().encode(), address))
        self._store.settle()

    def read(self, address: str) -> Index:
        """Return an index; NotFound if there is none."""
        return decode_index(self._cipher.open(self._store.get(address), address), address)

    def remove(self, address: str) -> None:
        self._store.remove(address)

    def all(self, prefix: str) -> Iterator[tuple[str, Index]]:
        """Read every index below a prefix; one that cannot be read is an error, since nobody knows what it needs."""
        for stored in list(self._store.list(prefix)):
            yield stored.name, self.read(stored.name)

    def versions(self, name: str | None = None) -> list[Version]:
        """List archives, by name and then the oldest first."""
        prefix = ARCHIVES if name is None else f"{ARCHIVES}{_quoted(name)}/"
        found = [_listed(stored.name) for stored in self._store.list(prefix)]
        return sorted((version for version in found if version), key=lambda version: (version.name, version.version))

    def newest(self, name: str) -> str:
        versions = self.versions(name)
        if not versions:
            raise NotFound(f"there is no archive of {name!r}", hint="list the archives to see their names")
        return versions[-1].version

    def following(self, name: str) -> str:
        """Make up the version of the next archive: numbered, since clocks go back."""
        versions = self.versions(name)
        number = int(versions[-1].version[:8]) + 1 if versions else 1
        return f"{number:08}-{datetime.now(UTC).strftime(_WHEN)}-{secrets.token_hex(4)}"


def archive_address(name: str, version: str) -> str:
    if not _VERSION.fullmatch(version):
        raise InvalidRequest(f"{version!r} is no version of an archive", hint="list the archives of the workspace")
    return f"{ARCHIVES}{_quoted(name)}/{version}"


def snapshot_address(hash_: str) -> str:
    return f"{SNAPSHOTS}{_quoted(hash_)}"


def _quoted(name: str) -> str:
    """Write a name as part of an object's: no slash, no dot at its beginning, nothing that a file cannot have."""
    try:
        quoted = quote(name, safe=":@ ", errors="strict").replace(" ", "%20")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name!r} cannot be the name of an archive", hint="use letters and digits") from None
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"
    if not 0 < len(quoted) <= _LONGEST:
        raise InvalidRequest(f"the name of an archive is empty or too long: {name[:50]!r}", hint="use a shorter one")
    return quoted


def _listed(address: str) -> Version | None:
    _, _, rest = address.partition("/")
    name, _, version = rest.partition("/")
    match = _VERSION.fullmatch(version)
    if match is None:
        return None
    return Version(unquote(name), version, datetime.strptime(match["when"], _WHEN).replace(tzinfo=UTC))
