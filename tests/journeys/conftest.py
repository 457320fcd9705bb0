from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
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


@pytest.fixture(scope="session")
def houses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Protocol], House]]:
    """Give the served home, with the hive `garden`, whose models speak a protocol."""
    with ExitStack() as stack:

        @cache
        def served(protocol: Protocol) -> House:
            made = stack.enter_context(house(tmp_path_factory.mktemp(protocol), protocol, **SETTINGS))
            stack.enter_context(made.serving())
            return made

        yield served


@pytest.fixture(params=["openai", "anthropic"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    found: Protocol = request.param
    return found


@pytest.fixture
def served(houses: Callable[[Protocol], House], protocol: Protocol) -> House:
    return houses(protocol)


@pytest.fixture
def garden(houses: Callable[[Protocol], House]) -> House:
    """One of the homes, for what is the same whatever models speak."""
    return houses("openai")
