"""A slow mechanism's suite runs in part every time, and whole when it is asked for: pytest -m 'whole or not whole'."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the promises of a suite that are not among its `every_time`, unless `-m` speaks of them."""
    rest = [item for item in items if _is_of_the_rest(item)]
    for item in rest:
        item.add_marker("whole")
    if rest and "whole" not in config.option.markexpr:
        config.hook.pytest_deselected(items=rest)
        left_out = set(rest)
        items[:] = [item for item in items if item not in left_out]


def _is_of_the_rest(item: pytest.Item) -> bool:
    suite = getattr(item, "cls", None)
    chosen = getattr(suite, "every_time", None)
    name = getattr(item, "originalname", item.name)
    return chosen is not None and not any(name in vars(part) for part in chosen)
