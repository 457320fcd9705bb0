"""What a sandbox may reach, as its creator says it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from skep.sandbox.egress.policy import Policy, Traffic, parse_policy

_TRUST = "/etc/ssl/certs/ca-certificates.crt"

Fetch = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Secret:
    """A credential that the sandbox never sees: `fetch` is asked for its value each time it is used.

    The value is put into one header (`Authorization`, say) of requests over TLS to one host, and nowhere else.
    """

    host: str
    header: str
    fetch: Fetch = field(repr=False)


@dataclass(frozen=True, slots=True)
class Event:
    """Something the proxy or its keeper noticed.

    - `refused`: a connection or request was not let through (`host`, `port`, `reason`)
    - `secret_used`, `secret_unavailable`: a secret was put in, or could not be had (`name`, `host` or `reason`)
    - `stray_secret`: a placeholder stands where it is worth nothing (`name`, `place`, `host`)
    - `limited`: the sandbox has met a limit (`limit`)
    - `proxy_lost`: the proxy died (`said`); another takes its place, until then nothing gets out

    `missed` counts events that were dropped before this one because there were too many.
    """

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
    #: Certificates that the hosts of secrets are checked against; the system's own by default.
    trust: str = _TRUST

    @classmethod
    def to(
        cls,
        *allow: str,
        secrets: Mapping[str, Secret] | None = None,
        upstreams: Mapping[str, str] | None = None,
        traffic: Traffic | None = None,
        on_event: Callable[[Event], None] | None = None,
        trust: str = _TRUST,
    ) -> Network:
        """Allow hosts (`example.org`, `*.example.org`, `host:8443`) and named sets (`pypi`, `npm`, `debian`, `github`).

        The hosts of secrets are allowed with them.
        """
        secrets = secrets or {}
        wanted = [*allow, *(secret.host for secret in secrets.values())]
        policy = parse_policy(wanted, upstreams=dict(upstreams or {}), traffic=traffic)
        return cls(policy, secrets, on_event or _ignore, trust)


def _ignore(event: Event) -> None:
    """Take note of nothing."""
