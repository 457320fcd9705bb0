"""Where archives are kept: a place that holds objects by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from skep.errors import ConfigInvalid

_HINT = "give a folder, file:///folder or s3://bucket/prefix?endpoint=https://…&region=…"


@dataclass(frozen=True, slots=True)
class Stored:
    """An object in a store: its name, size, and when it was written by the store's own clock, in seconds."""

    name: str
    size: int
    written_at: float


class Store(Protocol):
    """Holds objects. All calls block, may come from several threads, and raise StoreUnavailable or StorageFull.

    An object appears complete or not at all, and what was put is seen by every later `get`, `find` and `list`.
    """

    url: str
    #: How many calls at a time serve it best.
    lanes: int

    def put(self, name: str, data: bytes) -> None:
        """Write an object, over one of the same name if there is one."""

    def get(self, name: str) -> bytes:
        """Return an object; NotFound if there is none."""

    def find(self, name: str) -> Stored | None:
        """Describe an object without reading it."""

    def list(self, prefix: str) -> Iterator[Stored]:
        """Describe the objects whose names begin with a folder, which ends in `/`."""

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""

    def settle(self) -> None:
        """Return when everything written before would survive a power cut."""

    def tidy(self, older_than_s: float) -> None:
        """Remove what writes that were cut off have left behind."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who one is to an S3 store."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


def open_store(url: str, *, credentials: Credentials | None = None, patience_s: float = 60.0) -> Store:
    """Open the store at a URL, or in a folder by its path. Nothing is asked of it yet.

    An S3 store that does not answer is asked again for `patience_s` before it counts as unavailable.
    """
    parts = urlsplit(url)
    match parts.scheme:
        case "" | "file":
            return _open_folder(url, parts.netloc, unquote(parts.path) if parts.scheme else url)
        case "s3":
            from skep.workspace.archive.s3 import S3Store

            return S3Store.open(parts.netloc, parts.path.strip("/"), _options(url), credentials, patience_s)
        case scheme:
            raise ConfigInvalid(f"archives cannot be kept at {scheme}: addresses", hint=_HINT)


def _open_folder(url: str, host: str, path: str) -> Store:
    from skep.workspace.archive.folder import FolderStore

    if host or not path or not Path(path).is_absolute():
        raise ConfigInvalid(f"{url!r} does not name a folder of this machine", hint=_HINT)
    return FolderStore(Path(path))


def _options(url: str) -> dict[str, str]:
    query = urlsplit(url).query
    try:
        return {name: values[-1] for name, values in parse_qs(query, strict_parsing=bool(query)).items()}
    except ValueError as error:
        raise ConfigInvalid(f"{url!r} is no address of a store: {error}", hint=_HINT) from error
