"""What a store is: a place that holds objects by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol


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

    def put(self, name: str, data: bytes | bytearray) -> None:
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
