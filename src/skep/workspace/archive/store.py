"""Where archives are kept: open a store by its address."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from skep.errors import ConfigInvalid
from skep.workspace.archive.folder import FolderStore
from skep.workspace.archive.objects import Credentials, Store
from skep.workspace.archive.s3 import S3Store

__all__ = ["Credentials", "Store", "open_store"]

_HINT = "give a folder, file:///folder or s3://bucket/prefix?endpoint=https://…&region=…"


def open_store(url: str, *, credentials: Credentials | None = None, patience_s: float = 60.0) -> Store:
    """Open the store at a URL, or in a folder by its path. Nothing is asked of it yet.

    An S3 store that does not answer is asked again for `patience_s` before it counts as unavailable.
    """
    parts = urlsplit(url)
    match parts.scheme:
        case "" | "file":
            return _open_folder(url, parts.netloc, unquote(parts.path) if parts.scheme else url)
        case "s3":
            return S3Store.open(parts.netloc, parts.path.strip("/"), _options(url), credentials, patience_s)
        case scheme:
            raise ConfigInvalid(f"archives cannot be kept at {scheme}: addresses", hint=_HINT)


def _open_folder(url: str, host: str, path: str) -> Store:
    if host or not path or not Path(path).is_absolute():
        raise ConfigInvalid(f"{url!r} does not name a folder of this machine", hint=_HINT)
    return FolderStore(Path(path))


def _options(url: str) -> dict[str, str]:
    query = urlsplit(url).query
    try:
        return {name: values[-1] for name, values in parse_qs(query, strict_parsing=bool(query)).items()}
    except ValueError as error:
        raise ConfigInvalid(f"{url!r} is no address of a store: {error}", hint=_HINT) from error
