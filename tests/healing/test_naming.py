from __future__ import annotations

from asyncio import CancelledError
from typing import get_args

import pytest

from skep.agent.observations import TroubleKind
from skep.errors import (
    Denied,
    LimitReached,
    ModelMissing,
    ModelUnavailable,
    SandboxDisabled,
    SandboxLost,
    StorageFull,
)
from skep.healing.failure import KINDS, Check, FailureKind, ToolKind
from skep.healing.naming import name, of_trouble
from skep.healing.table import TABLE
from skep.models.failures import ModelFailure


def test_there_is_a_row_for_each_kind_and_for_nothing_else() -> None:
    assert set(TABLE) == set(KINDS)
    assert len(set(KINDS)) == len(KINDS)


def test_each_way_in_which_a_tool_fails_is_a_failure_here() -> None:
    # The two lists are kept apart, since neither of those layers may know the other.
    told = get_args(TroubleKind)
    assert set(told) <= set(KINDS)
    assert [of_trouble(kind, "", "browse").kind for kind in told] == list(told)
    assert set(get_args(ToolKind)) <= set(told)


def test_a_models_failure_keeps_what_is_known_about_it() -> None:
    failure = name(ModelFailure("slow down", kind="rate_limit", provider="openai", retry_after_s=3))
    assert (failure.kind, failure.provider, failure.retry_after_s, failure.message, failure.check) == (
        "rate_limit",
        "openai",
        3,
        "slow down",
        None,
    )


def test_a_schema_that_was_not_kept_is_an_executed_check() -> None:
    failure = name(ModelFailure("`tasks` is missing", kind="invalid_output", provider="openai"))
    assert failure.check == Check("schema of the answer", False, "`tasks` is missing")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SandboxLost("gone"), "sandbox_lost"),
        (SandboxDisabled("off"), "sandbox_disabled"),
        (Denied("no"), "denied"),
        (LimitReached("enough"), "limit"),
        (StorageFull("full"), "limit"),
        (ModelUnavailable("none"), "overloaded"),
        (ModelMissing("none"), "unknown"),
        (TimeoutError(), "timeout"),
        (CancelledError(), "cancelled"),
        (ZeroDivisionError("x"), "unknown"),
    ],
)
def test_each_error_has_its_name(error: BaseException, kind: FailureKind) -> None:
    assert name(error).kind == kind


def test_an_error_keeps_its_hint() -> None:
    assert name(ModelMissing("none", hint="add one")).hint == "add one"
    assert name(ModelFailure("x", kind="refused", provider="openai", hint="check the key")).hint == "check the key"


def test_what_a_tool_reports_keeps_what_could_be_done_about_it() -> None:
    failure = of_trouble("missing_package", "No module named 'yaml'", "run_python", packages=["pyyaml"])
    assert (failure.kind, failure.tool, failure.packages) == ("missing_package", "run_python", ("pyyaml",))
    assert of_trouble("empty_result", "", "browse", fallback="run_command").fallback == "run_command"
    assert of_trouble("of another age", "", "browse").kind == "tool_error"
