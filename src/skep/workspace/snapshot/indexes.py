"""Where packages come from, and the way out that leads there and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from skep.errors import InvalidRequest
from skep.sandbox.egress.network import Event, Network
from skep.sandbox.egress.policy import Policy, normal_host, parse_policy

Ecosystem = Literal["python", "node"]


@dataclass(frozen=True, slots=True)
class Indexes:
    """The package index and the registry that are asked; the public ones where none is named.

    `upstreams` pins hosts to addresses, as in `Network.to`; the hosts it names are allowed too, since an index may
    serve its files from another host.
    """

    python_index: str | None = None
    node_registry: str | None = None
    upstreams: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for url in (self.python_index, self.node_registry):
            if url is not None:
                _host(url)

    def network(self, on_event: Callable[[Event], None] | None = None) -> Network:
        """Return the network of a sandbox that may reach these indexes alone."""
        sources = self.sources.values()
        return Network.to(*sources, *self.upstreams, upstreams=self.upstreams, on_event=on_event)

    @property
    def sources(self) -> dict[Ecosystem, str]:
        """Where each kind of packages comes from, as an entry of an allow-list."""
        return {
            "python": "pypi" if self.python_index is None else _host(self.python_index),
            "node": "npm" if self.node_registry is None else _host(self.node_registry),
        }

    def listed(self, allowed: Policy) -> frozenset[Ecosystem]:
        """Return the kinds of packages that come from hosts which an allow-list covers."""
        return frozenset(kind for kind, source in self.sources.items() if _covers(allowed, parse_policy([source])))

    def python_flags(self) -> tuple[str, ...]:
        """Return what uv is told."""
        return () if self.python_index is None else ("--default-index", self.python_index)

    def node_flags(self) -> tuple[str, ...]:
        """Return what npm is told."""
        return () if self.node_registry is None else ("--registry", self.node_registry)


def _covers(allowed: Policy, wanted: Policy) -> bool:
    return all(any(allowed.allows(rule.host, port) for port in rule.ports) for rule in wanted.rules)


def _host(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = normal_host(parts.hostname or ""), parts.port
    except ValueError as error:
        raise InvalidRequest(
            f"{url[:200]!r} is not an address: {error}", hint="write it as https://host/path"
        ) from error
    if parts.scheme not in ("https", "http"):
        raise InvalidRequest(f"{url[:200]!r} is not an address", hint="write it as https://host/path")
    if parts.username is not None or parts.password is not None:
        # It would be shown to every package that is built.
        raise InvalidRequest(
            f"the address of the index at {host} holds a password",
            hint="use an index that needs none, such as a mirror",
        )
    return f"{host}:{port}" if port else host
