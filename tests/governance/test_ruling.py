"""What stays inside is allowed, what reaches out is asked for, and what no rule knows is denied."""

from __future__ import annotations

from typing import cast

import pytest

from skep.governance.ruling import Asked, Policy, Reach, rule

NAMED = Policy(may_reach_out=frozenset({"browse"}))
DENIED = Policy(may_reach_out=frozenset({"browse"}), denied=frozenset({"browse"}))


@pytest.mark.parametrize(
    ("tool", "reach", "policy", "verdict"),
    [
        ("run_command", "inside", Policy(), "allow"),
        ("ask_user", "person", Policy(), "allow"),
        ("run_command", "listed", Policy(), "allow"),
        ("run_command", "listed", Policy(denied=frozenset({"run_command"})), "deny"),
        ("browse", "outside", Policy(), "ask"),
        ("browse", "outside", NAMED, "allow"),
        ("expose_port", "outside", NAMED, "ask"),
        ("browse", "outside", DENIED, "deny"),
        ("browse", "inside", DENIED, "deny"),
        ("run_command", "elsewhere", Policy(), "deny"),
    ],
)
def test_an_act_is_ruled_on_by_how_far_it_reaches(tool: str, reach: str, policy: Policy, verdict: str) -> None:
    ruling = rule(Asked(tool, cast(Reach, reach), "it wants to"), policy)
    assert ruling.verdict == verdict and ruling.why
