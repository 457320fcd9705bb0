"""Folders on their way, in threads of their own: a pipe stands between each and the conversation."""

from __future__ import annotations

import contextlib
import os
import threading

from skep.sandbox.erase import empty
from skep.sandbox.twin.inside.packing import Packing
from skep.sandbox.twin.inside.planting import Planting, Stream

_DIGEST_BYTES = 32
_PIECE = 1 << 18


def packed(folder: int, known: str) -> int:
    """Return the end of a pipe from which a folder, which is closed then, comes as a stream."""
    text = bytes.fromhex(known)
    digests = frozenset(text[at : at + _DIGEST_BYTES] for at in range(0, len(text), _DIGEST_BYTES))
    reading, writing = os.pipe2(os.O_CLOEXEC)
    threading.Thread(target=_pack, args=(folder, writing, digests), daemon=True).start()
    return reading


def _pack(folder: int, writing: int, known: frozenset[bytes]) -> None:
    try:
        # Whoever reads sees by the stream itself that it is not whole; nobody may read any more.
        with contextlib.suppress(OSError), open(writing, "wb", buffering=_PIECE) as pipe:
            Packing(pipe.write, known).run(folder)
    finally:
        os.close(folder)


class Planted:
    """A folder that is being made what a stream says; see `transfer.Upload`."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._reading, self.fd = os.pipe2(os.O_CLOEXEC)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._plant, daemon=True)
        self._thread.start()

    def publish(self, _: int | None) -> None:
        """Wait until everything is in its place."""
        self._close()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def discard(self) -> None:
        self._close()
        self._thread.join()
        os.close(self._folder)

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _plant(self) -> None:
        with open(self._reading, "rb", buffering=_PIECE) as pipe:
            try:
                top = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._folder)
                try:
                    empty(top)
                    Planting(top).run(Stream(pipe.read))
                    os.fsync(top)
                finally:
                    os.close(top)
            except OSError as error:
                self._failure = error
            except (ValueError, TypeError, LookupError, AttributeError):
                self._failure = OSError(74, "the stream is garbled")
            while pipe.read(_PIECE):  # whoever sends learns of it at the end
                pass
