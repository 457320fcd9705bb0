"""Which hosts a sandbox may reach."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from skep.errors import InvalidRequest

#: Groups of hosts by what they are for. Registries serve files from hosts of their own, so those are in.
NAMED_SETS: dict[str, tuple[str, ...]] = {
    "pypi": ("pypi.org", "files.pythonhosted.org"),
    "npm": ("registry.npmjs.org",),
    "debian": ("deb.debian.org:80,443", "security.debian.org:80,443", "archive.ubuntu.com:80,443"),
    "github": ("github.com", "api.github.com", "codeload.github.com", "*.githubusercontent.com"),
}
DEFAULT_PORTS = frozenset({80, 443})
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


@dataclass(frozen=True, slots=True)
class Rule:
    """One host, or with `below` every host under it, and the ports that may be used."""

    host: str
    below: bool = False
    ports: frozenset[int] = DEFAULT_PORTS

    def covers(self, host: str, port: int) -> bool:
        named = host.endswith("." + self.host) if self.below else host == self.host
        return named and port in self.ports

    def __str__(self) -> str:
        name = f"*.{self.host}" if self.below else self.host
        return name if self.ports == DEFAULT_PORTS else f"{name}:{','.join(map(str, sorted(self.ports)))}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """How much one sandbox may send and receive."""

    connections: int = 256
    bytes_total: int = 20 << 30
    connection_s: float = 3600.0
    idle_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Policy:
    """The allow-list of one sandbox. What no rule covers is refused.

    `upstreams` pins a host to an address that the operator chose. Only such an address may be private: a mirror in
    the company's own network, or a test server on loopback.
    """

    rules: tuple[Rule, ...] = ()
    upstreams: dict[str, str] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)

    def allows(self, host: str, port: int) -> bool:
        return any(rule.covers(host, port) for rule in self.rules)

    @property
    def ports(self) -> frozenset[int]:
        """The ports that have to be answered: those of the rules, and the web's, so that refusals can be told."""
        return DEFAULT_PORTS.union(*(rule.ports for rule in self.rules))

    def summary(self, limit: int = 12) -> str:
        """Say in one line what is allowed."""
        names = [str(rule) for rule in self.rules]
        more = f" and {len(names) - limit} more" if len(names) > limit else ""
        return (", ".join(names[:limit]) + more) or "nothing"


def parse_policy(
    allow: Iterable[str], *, upstreams: dict[str, str] | None = None, traffic: Traffic | None = None
) -> Policy:
    """Read an allow-list: names of sets, hosts, `*.suffix`, each with `:port` or `:port,port` behind it if need be."""
    rules: list[Rule] = []
    for entry in allow:
        rules += [parse_rule(host) for host in NAMED_SETS.get(entry, (entry,))]
    pinned = {normal_host(host): address for host, address in (upstreams or {}).items()}
    return Policy(tuple(dict.fromkeys(rules)), pinned, traffic or Traffic())


def parse_rule(entry: str) -> Rule:
    """Read one entry of an allow-list."""
    name, colon, ports = entry.strip().partition(":")
    below = name.startswith("*.")
    host = normal_host(name[2:] if below else name)
    if below and "." not in host:
        raise InvalidRequest(
            f"{entry!r} allows a whole top-level domain", hint="name the domain itself, such as *.example.org"
        )
    return Rule(host, below, _parse_ports(entry, ports.split(",")) if colon else DEFAULT_PORTS)


def normal_host(name: str) -> str:
    """Return a host name in the one form in which names are compared, or refuse what is not one.

    Addresses are not names, in whatever spelling: a last label that is a number makes an address of it.
    """
    try:
        host = name.strip().rstrip(".").encode("idna").decode().lower()
    except UnicodeError:
        host = ""
    labels = host.split(".")
    if not host or len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise InvalidRequest(f"{name[:100]!r} is not a host name", hint="use a name such as pypi.org or *.example.org")
    if re.fullmatch(r"\d+|0x[0-9a-f]*", labels[-1]):
        raise InvalidRequest(f"{name[:100]!r} is an address, not a host name", hint="allow hosts by name")
    return host


def _parse_ports(entry: str, numbers: Sequence[str]) -> frozenset[int]:
    try:
        ports = frozenset(int(number) for number in numbers)
    except ValueError:
        ports = frozenset()
    if not ports or not all(0 < port < 65536 for port in ports) or ports & {53, PROXY_PORT}:
        raise InvalidRequest(f"{entry!r} names no usable port", hint="write ports as host:443 or host:80,8080")
    return ports


#: Where a program that knows of proxies finds this one, on the sandbox's loopback.
PROXY_PORT = 3128
