"""Say what to install where a framework is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from skep.errors import Unavailable


@contextmanager
def extra(name: str, *, brings: str) -> Iterator[None]:
    """Explain a failed import of the package that one of Skep's extras brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != brings:
            raise
        install = f"pip install 'skep[{name}]'"
        raise Unavailable(f"the package {brings} is not installed: {install}", hint=install) from error
