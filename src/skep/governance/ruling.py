"""Rule on an act before it runs: what stays inside is allowed, what reaches out is asked for, the rest is denied.

Hosts on the allow-list were allowed by whoever wrote it, and the sandbox's way out holds to it: nobody is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: How far an act goes: it stays in the sandbox, it reaches at most hosts that a person has listed, it reaches further,
#: or it speaks to the person.
Reach = Literal["inside", "listed", "outside", "person"]
Verdict = Literal["allow", "ask", "deny"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody wants to do; `summary` is one line for whoever decides."""

    tool: str
    reach: Reach
    summary: str


@dataclass(frozen=True, slots=True)
class Ruling:
    """What was decided, and why."""

    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class Policy:
    """What a person has decided in advance, by the names of tools; a denial wins."""

    may_reach_out: frozenset[str] = frozenset()
    denied: frozenset[str] = frozenset()


def rule(asked: Asked, policy: Policy) -> Ruling:
    """Decide about one act. What no rule knows is denied."""
    if asked.tool in policy.denied:
        return Ruling("deny", f"the policy denies {asked.tool}")
    reach: str = asked.reach  # what is typed may still arrive as something else
    match reach:
        case "inside":
            return Ruling("allow", "it stays inside the sandbox")
        case "listed":
            return Ruling("allow", "it reaches no hosts but those that are listed")
        case "person":
            return Ruling("allow", "it only speaks to the person")
        case "outside" if asked.tool in policy.may_reach_out:
            return Ruling("allow", f"the policy lets {asked.tool} reach out")
        case "outside":
            return Ruling("ask", f"{asked.tool} reaches beyond the sandbox")
    return Ruling("deny", f"no rule knows {asked.tool}")
