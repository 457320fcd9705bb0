"""One server for all tests of the door, with hives of two accounts; it goes with the last of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.gateway.served import Served, furnish, serving


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory, warm_scripts: Path) -> Iterator[Served]:
    with serving(furnish(tmp_path_factory.mktemp("served"), warm_scripts)) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client(served.home.token()) as found:
        yield found


@pytest.fixture
def stranger(served: Served) -> Iterator[httpx.Client]:
    """Somebody of another account."""
    with served.client(served.home.token("acme")) as found:
        yield found
