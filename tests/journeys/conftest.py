from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.journeys.house import House, house
from tests.models.servers import Protocol

#: Short enough that a model which never answers does not hold a test up, and long enough for one that does.
SETTINGS: dict[str, Any] = {
    "tasks": {"model_timeout_s": 4},
    "budgets": {"steps_per_task": 8},
    "sandbox": {"limits": {"command_timeout_s": 2}},
}


@pytest.fixture(scope="module", params=["openai", "anthropic"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    found: Protocol = request.param
    return found


@pytest.fixture(scope="module")
def served(protocol: Protocol, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A home with the hive `garden`, served, whose models speak one protocol."""
    with house(tmp_path_factory.mktemp(protocol), protocol, **SETTINGS) as made, made.serving():
        yield made
