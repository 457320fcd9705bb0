"""One server for all tests of the door, with hives of two accounts."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.gateway.served import Served, done, furnish, serving


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("served")
    furnish(home)
    done(home, "hive", "create", "garden")
    done(home, "account", "create", "acme")
    done(home, "hive", "create", "meadow", "--account", "acme")
    with serving(home) as server:
        yield server


@pytest.fixture(scope="session")
def token(served: Served) -> str:
    return served.token()


@pytest.fixture
def client(served: Served, token: str) -> Iterator[httpx.Client]:
    with served.client(token) as found:
        yield found


@pytest.fixture(scope="session")
def stranger(served: Served) -> Iterator[httpx.Client]:
    """Somebody of another account."""
    with served.client(served.token("acme")) as found:
        yield found
