from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from tests.journeys.house import House, house, plant
from tests.models.servers import Protocol

#: Short enough that a model which never answers does not hold a test up, and long enough for one that does.
SETTINGS: dict[str, Any] = {
    "tasks": {"model_timeout_s": 4},
    "budgets": {"steps_per_task": 8},
    "sandbox": {"limits": {"command_timeout_s": 2}},
}

#: A post that must be plain, a search that finds nothing and names another, and one whose server is broken.
SKILLS = {
    "post": """case $1 in *"*"*) echo '{"status": 400, "message": "no rich text"}';; *) echo posted;; esac\n""",
    "find": """echo '{"status": 204}'\n""",
    "look": "echo found\n",
    "broken": """echo '{"status": 500, "message": "out of order"}'\n""",
}


@pytest.fixture(scope="package")
def houses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Protocol], House]]:
    """Give the served home, with the hive `garden`, whose models speak a protocol."""
    with ExitStack() as stack:

        @cache
        def served(protocol: Protocol) -> House:
            made = stack.enter_context(house(tmp_path_factory.mktemp(protocol), protocol, **SETTINGS))
            for name, script in SKILLS.items():
                plant(made.home, name, script, fallback="system/look" if name == "find" else "")
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
