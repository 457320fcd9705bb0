"""Who may do what to a store at the same time: any number of saves, or those who remove chunks that nobody needs.

A save relies on chunks that are there already and that no archive may refer to yet, so none may be removed under it.
Stores have no locks; each side leaves a mark first and looks for the other's marks second. What one has put the other
sees, so at least one of two sees the other: a save then waits, a collection gives up. A mark is renewed while the work
goes on; one that has not been renewed for `STALE_S`, by the store's own clock, is of somebody who died.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skep.errors import Conflict, StoreUnavailable
from skep.workspace.archive.objects import Store

STALE_S = 3600.0
_RENEWED_S = 60.0
_PATIENCE_S = 600.0
_POLL_S = 0.2
_SAVING, _COLLECTING = "turns/saving/", "turns/collecting/"


class Turn:
    """A mark in the store that says what somebody is doing."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._name = folder + secrets.token_hex(16)
        self._renewed_at = 0.0

    def renew(self) -> None:
        """Say that the work goes on; to be called often, as it rarely does anything."""
        now = time.monotonic()
        if now - self._renewed_at > _RENEWED_S:
            if self._renewed_at:
                self.confirm()
            self._store.put(self._name, b"")
            self._renewed_at = now

    def confirm(self) -> None:
        """Raise StoreUnavailable if the mark is gone: it was thought dead, and what it relied on may be gone too."""
        if self._store.find(self._name) is None:
            raise StoreUnavailable("the save was held up for too long", hint="save again: what is there is kept")

    def clear(self) -> None:
        self._store.remove(self._name)

    def others(self, folder: str) -> bool:
        """Tell whether there are live marks of the other kind; dead ones are removed."""
        own = self._store.find(self._name)
        now = own.written_at if own else time.time()
        alive = False
        for mark in self._store.list(folder):
            if mark.written_at < now - STALE_S:
                self._store.remove(mark.name)
            else:
                alive = True
        return alive


@contextmanager
def saving(store: Store, check: Callable[[], None]) -> Iterator[Turn]:
    """Keep chunks from being removed, waiting for whoever removes some now."""
    with _turn(store, _SAVING) as turn:
        deadline = time.monotonic() + _PATIENCE_S
        while turn.others(_COLLECTING):
            check()
            if time.monotonic() > deadline:
                raise StoreUnavailable("chunks are being collected without end", hint="try again later")
            time.sleep(_POLL_S)
        yield turn


@contextmanager
def collecting(store: Store) -> Iterator[Turn]:
    """Keep saves waiting; Conflict if one is under way."""
    with _turn(store, _COLLECTING) as turn:
        if turn.others(_SAVING):
            raise Conflict("an archive is being saved", hint="collect when the save is done")
        yield turn


@contextmanager
def _turn(store: Store, folder: str) -> Iterator[Turn]:
    turn = Turn(store, folder)
    turn.renew()
    try:
        yield turn
    finally:
        turn.clear()
