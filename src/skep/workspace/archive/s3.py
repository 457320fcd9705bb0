"""A store that speaks S3."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from skep.errors import ConfigInvalid, NotFound, StorageFull, StoreUnavailable
from skep.workspace.archive.objects import Credentials, Stored

if TYPE_CHECKING:
    from obstore.store import S3Store as Bucket

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_KNOWN = {"endpoint", "region"}
_REQUEST_S = 60.0
_NO_BUCKET = "NoSuchBucket"
_FULL = ("QuotaExceeded", "StorageFull", "InsufficientStorage", "507 ")


class S3Store:
    """Keeps objects in a bucket, under a prefix. It is told who it is, and takes nothing from the environment."""

    lanes = 8

    def __init__(self, url: str, bucket: Bucket) -> None:
        self.url = url
        self._bucket = bucket

    @classmethod
    def open(
        cls,
        bucket: str,
        prefix: str,
        options: Mapping[str, str],
        credentials: Credentials | None,
        patience_s: float,
    ) -> S3Store:
        try:
            import obstore.store
        except ModuleNotFoundError as error:
            raise ConfigInvalid("archives in S3 need obstore", hint="pip install 'skep[s3]'") from error
        if not _BUCKET.match(bucket) or ".." in f"{prefix}/".split("/"):
            raise ConfigInvalid(f"s3://{bucket}/{prefix} is no place in a bucket", hint="s3://bucket/prefix")
        if unknown := set(options) - _KNOWN:
            raise ConfigInvalid(
                f"s3 addresses have no {', '.join(sorted(unknown))}", hint=f"known are {', '.join(sorted(_KNOWN))}"
            )
        if credentials is None:
            raise ConfigInvalid(f"s3://{bucket} needs credentials", hint="give an access key and its secret")
        region = options.get("region", "us-east-1")
        endpoint = options.get("endpoint", f"https://s3.{region}.amazonaws.com")
        made = obstore.store.S3Store(
            bucket,
            prefix=prefix or None,
            # Whatever is not given here is taken from the environment, so everything is.
            config={
                "endpoint": endpoint,
                "aws_endpoint_url_s3": endpoint,
                "region": region,
                "skip_signature": False,
                "virtual_hosted_style_request": False,
                "unsigned_payload": False,
                "request_payer": False,
                "s3_express": False,
            },
            credential_provider=_Known(credentials),
            client_options={
                "allow_http": _may_be_plain(endpoint),
                "allow_invalid_certificates": False,
                "timeout": timedelta(seconds=_REQUEST_S),
            },
            retry_config={
                "retry_timeout": timedelta(seconds=patience_s),
                "max_retries": 1000,
                "backoff": {"max_backoff": timedelta(seconds=5)},
            },
        )
        return cls(f"s3://{bucket}/{prefix}", made)

    def put(self, name: str, data: bytes | bytearray) -> None:
        import obstore

        with self._explained(name):
            obstore.put(self._bucket, name, data, use_multipart=False)

    def get(self, name: str) -> bytes:
        import obstore

        with self._explained(name):
            return bytes(obstore.get(self._bucket, name).bytes())

    def find(self, name: str) -> Stored | None:
        import obstore

        try:
            with self._explained(name):
                found = obstore.head(self._bucket, name)
        except NotFound:
            return None
        return _stored(found)

    def list(self, prefix: str) -> Iterator[Stored]:
        import obstore

        with self._explained(prefix):
            for page in obstore.list(self._bucket, prefix, chunk_size=1000):
                yield from (_stored(found) for found in page)

    def remove(self, name: str) -> None:
        import obstore

        with contextlib.suppress(NotFound), self._explained(name):
            obstore.delete(self._bucket, name)

    def settle(self) -> None:
        """Nothing is left to do: an answered put is kept."""

    def tidy(self, older_than_s: float) -> None:
        """Nothing is left behind: a put that was cut off has never been."""

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError

        try:
            yield
        except (NotFoundError, FileNotFoundError) as error:
            if _NO_BUCKET in str(error):
                raise self._failure(name, str(error)) from error
            raise NotFound(f"the store has no {name}", hint="list what it has") from error
        except (BaseError, OSError) as error:
            refused = isinstance(error, PermissionDeniedError | UnauthenticatedError)
            raise self._failure(name, str(error), refused=refused) from error

    def _failure(self, name: str, told: str, *, refused: bool = False) -> StorageFull | StoreUnavailable:
        if any(sign in told for sign in _FULL):
            return StorageFull(f"{self.url} has no room left for {name}", hint="remove archives and collect")
        if _NO_BUCKET in told:
            return StoreUnavailable(f"there is no bucket for {self.url}", hint="make the bucket first")
        if refused:
            return StoreUnavailable(f"{self.url} refuses the credentials", hint="check the key and its rights")
        reason = told.strip().partition("\n")[0][:300] or "no reason given"
        return StoreUnavailable(
            f"{self.url} cannot be reached: {name}: {reason}", hint="try again: what is there is kept"
        )


class _Known:
    """Hands out credentials that are given, so that none are looked for."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def __call__(self) -> Any:
        given = self._credentials
        return {
            "access_key_id": given.access_key,
            "secret_access_key": given.secret_key,
            "token": given.session_token,
            "expires_at": None,
        }


def _stored(found: Any) -> Stored:
    return Stored(found["path"], found["size"], found["last_modified"].timestamp())


def _may_be_plain(endpoint: str) -> bool:
    """Tell whether an endpoint goes without TLS, which is for this machine alone."""
    parts = urlsplit(endpoint)
    if parts.scheme == "https" and parts.hostname:
        return False
    if parts.scheme == "http" and parts.hostname and _is_loopback(parts.hostname):
        return True
    raise ConfigInvalid(f"{endpoint!r} is no endpoint of an S3 store", hint="https://…, or http:// on this machine")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
