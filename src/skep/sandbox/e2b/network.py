"""What E2B's firewall can say of a policy; the rest is refused."""

from __future__ import annotations

from typing import Any

from skep.errors import InvalidRequest
from skep.sandbox.egress.policy import DEFAULT_PORTS, Policy, Traffic
from skep.sandbox.recipe import Recipe

#: An address that leads nowhere: E2B lets connections out by the name they are for, whatever address they go to.
NOWHERE = "198.18.0.1"
_ALL = "0.0.0.0/0"


def network(recipe: Recipe, *, public: bool) -> dict[str, Any]:
    """Say what a new machine may reach, and whether visitors may reach it."""
    return {**rules(recipe.network.policy if recipe.network else None), "allow_public_traffic": public}


def rules(policy: Policy | None) -> dict[str, Any]:
    """Say a policy in E2B's words, or refuse what they cannot say: what is let out is a name on ports 80 and 443.

    No name server is let out, or anything could leave in questions to it: the names are in the machine's own list.
    """
    if policy is None:
        return {"deny_out": [_ALL]}
    hint = "allow whole host names on their usual ports, or use another mechanism"
    for rule in policy.rules:
        if rule.below:
            raise InvalidRequest(f"E2B cannot let {rule} out without a name server, which lets out more", hint=hint)
        if rule.ports != DEFAULT_PORTS:
            raise InvalidRequest(f"E2B cannot hold {rule} to its ports", hint=hint)
    if policy.upstreams or policy.traffic != Traffic():
        raise InvalidRequest("E2B cannot pin hosts or count traffic", hint="leave upstreams and traffic out")
    return {"allow_out": names(policy), "deny_out": [_ALL], "dns_servers": []}


def hosts(recipe: Recipe) -> list[str]:
    """Return the names that a machine has to know by itself."""
    return names(recipe.network.policy) if recipe.network else []


def names(policy: Policy) -> list[str]:
    return [rule.host for rule in policy.rules]
