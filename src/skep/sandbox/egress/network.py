"""What a sandbox may reach, as its creator says it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from skep.sandbox.egress.policy import Policy, Traffic, parse_policy

_TRUST = "/etc/ssl/certs/ca-certificates.crt"

Fetch = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Secret:
    """A credential that the sandbox never sees: `fetch` is asked for its value each time it is used."""

    host: str
    header: str
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Event:
    """Something the proxy noticed: refused, stray_secret, secret_used or limited."""

    kind: str
    sandbox: str
    details: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Network:
    """What a sandbox may reach, and the secrets that are put in for it on the way.

    `secrets` maps the environment variable that holds the stand-in to what it stands for.
    """

    policy: Policy = field(default_factory=Policy)
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    on_event: Callable[[Event], None] = field(default=lambda event: None)
    #: Certificates that hosts are checked against; the system's own by default.
    trust: str = _TRUST

    @classmethod
    def to(
        cls,
        *allow: str,
        secrets: Mapping[str, Secret] | None = None,
        upstreams: Mapping[str, str] | None = None,
        traffic: Traffic | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> Network:
        """Allow hosts (`pypi.org`, `*.example.org`, `host:8443`) and named sets (`pypi`, `npm`, `debian`, `github`).

        The hosts of secrets are allowed with them.
        """
        secrets = secrets or {}
        wanted = [*allow, *(secret.host for secret in secrets.values())]
        policy = parse_policy(wanted, upstreams=dict(upstreams or {}), traffic=traffic)
        return cls(policy, secrets, on_event or _ignore)


def _ignore(event: Event) -> None:
    """Take note of nothing."""
