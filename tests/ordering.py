"""Which tests come first: those that take longest, one after the other at the head of what each worker gets.

Workers begin with equal parts of the list and later take from the ends of each other's, but never the next two tests:
one that takes long and is begun last has everybody wait for it.
"""

from __future__ import annotations

import pytest

#: The beginnings of their names, longest first.
LONG = (
    "tests/crashes/test_tasks_killed.py",
    "tests/crashes/test_session_races.py::test_of_two_that_race",
    "tests/crashes/test_sessions_killed.py::test_a_kill_at_any_step",
    "tests/attacks/test_secrets.py::test_a_secret_is_never_on_disk",
    "tests/crashes/test_archive_killed.py::test_a_collection",
    "tests/crashes/test_workspace_killed.py::test_a_kill_before_any_call",
    "tests/docs/test_examples.py::test_python_examples_run[docs/guides/inspect-ai.md]",
    "tests/docs/test_examples.py::test_console_examples_print_what_they_say[README.md]",
    "tests/docs/test_examples.py::test_console_examples_print_what_they_say[docs/guides/workspaces.md]",
    "tests/journeys/test_flags.py",
    "tests/workspace/test_overlay.py::test_one_layer_made_of_several",
    "tests/crashes/test_build_full_disk.py",
    "tests/crashes/test_killed_appenders.py",
    "tests/workspace/archive/test_roundtrip.py::test_layers_come_back",
    "tests/crashes/test_tasks_relieved.py",
)


def put_long_first(items: list[pytest.Item], workers: int) -> None:
    """Deal the long ones to the heads of the parts in which workers get the list."""
    long = sorted((item for item in items if item.nodeid.startswith(LONG)), key=_rank)
    rest = [item for item in items if not item.nodeid.startswith(LONG)]
    total, taken = len(items), 0
    items.clear()
    for worker in range(workers):
        head = long[worker::workers]
        size = max(0, (total - len(items)) // (workers - worker) - len(head))
        items += [*head, *rest[taken : taken + size]]
        taken += size
    items += rest[taken:]


def _rank(item: pytest.Item) -> int:
    return next(rank for rank, name in enumerate(LONG) if item.nodeid.startswith(name))
