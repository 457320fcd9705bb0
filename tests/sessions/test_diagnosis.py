from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from skep.sessions.computers import Condition
from skep.sessions.diagnosis import REASONS, Sight, Step, choose
from skep.sessions.session import STATUSES


@pytest.mark.parametrize(
    ("sight", "step"),
    [
        (Sight("creating", "missing"), "make"),
        (Sight("creating", "half-made"), "make"),
        (Sight("stopped", "ready", has_run=True), "start"),
        (Sight("active", "ready", has_run=True), "start"),
        (Sight("archived", "missing", has_run=True, archived=True), "unarchive"),
        (Sight("archived", "ready", has_run=True, archived=True), "start"),
        (Sight("stopped", "damaged", has_run=True), "mend"),
        (Sight("stopped", "half-made", has_run=True), "mend"),
        (Sight("active", "missing", has_run=True), "refuse"),
        (Sight("stopped", "missing", has_run=True, may_recreate=True), "make"),
        (Sight("destroyed", "missing", has_run=True), "make"),
    ],
)
def test_each_finding_has_its_step(sight: Sight, step: Step) -> None:
    assert choose(sight) == step


SIGHTS = [
    Sight(*parts) for parts in product(STATUSES, get_args(Condition), (False, True), (False, True), (False, True))
]


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_what_has_run_is_never_made_anew_unasked(sight: Sight) -> None:
    step = choose(sight)
    assert step in REASONS
    if sight.has_run and sight.status != "destroyed" and not sight.may_recreate:
        assert step != "make"
    if sight.workspace in ("ready", "damaged"):
        assert step in ("start", "mend")
