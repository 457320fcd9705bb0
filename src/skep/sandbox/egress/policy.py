"""Which hosts a sandbox may reach."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address
from typing import Any

from skep.errors import InvalidRequest

#: Groups of hosts by what they are for. Registries serve files from hosts of their own, so those are in.
NAMED_SETS: dict[str, tuple[str, ...]] = {
    "pypi": ("pypi.org", "files.pythonhosted.org"),
    "npm": ("registry.npmjs.org",),
    "debian": ("deb.debian.org:80,443", "security.debian.org:80,443", "archive.ubuntu.com:80,443"),
    "github": ("github.com", "api.github.com", "codeload.github.com", "*.githubusercontent.com"),
}
DEFAULT_PORTS = frozenset({80, 443})
DNS_PORT = 53
#: Where a program that knows of proxies finds this one, on the sandbox's loopback.
PROXY_PORT = 3128
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
    """How much one sandbox may send and receive.

    A client has `head_s` to say what it wants: longer, and it is only holding a place. A connection that carries
    nothing either way for `idle_s` is closed; long calls to a model stay well below it.
    """

    connections: int = 256
    bytes_total: int = 20 << 30
    connection_s: float = 3600.0
    idle_s: float = 300.0
    head_s: float = 15.0


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
    allow: Iterable[str], *, upstreams: Mapping[str, str] | None = None, traffic: Traffic | None = None
) -> Policy:
    """Read an allow-list: names of sets, hosts, `*.suffix`, each with `:port` or `:port,port` behind it if need be."""
    rules: list[Rule] = []
    for entry in allow:
        rules += [parse_rule(host) for host in NAMED_SETS.get(entry, (entry,))]
    pinned = {normal_host(host): address for host, address in (upstreams or {}).items()}
    for address in pinned.values():
        parse_upstream(address)
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


def parse_upstream(text: str) -> tuple[str, int | None]:
    """Read where a host is pinned to: an address, with a port behind it if it is another than the one asked for."""
    found = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<four>[^:]+))(?::(?P<port>[0-9]{1,5}))?", text)
    address, port = (found["six"] or found["four"], int(found["port"] or 0)) if found else (text, 0)
    try:
        ip_address(address)
    except ValueError:
        port = 65536
    if port > 65535:
        raise InvalidRequest(f"{text!r} is not an address", hint="pin hosts to 10.1.2.3, 10.1.2.3:8080 or [fd00::1]:80")
    return address, port or None


def normal_host(name: str) -> str:
    """Return a name that a person wrote in the one form in which names are compared; other scripts are allowed."""
    try:
        ascii_name = name.strip().encode("idna").decode()
    except UnicodeError:
        ascii_name = ""
    return plain_host(ascii_name, shown=name)


def plain_host(name: str, *, shown: str | None = None) -> str:
    """Return a host name from the wire in the one form in which names are compared, or refuse what is not one.

    Addresses are not names, in whatever spelling: a last label that is a number makes an address of it.
    """
    host = name.removesuffix(".").lower() if name.isascii() else ""
    labels = host.split(".")
    shown = (name if shown is None else shown)[:100]
    if not host or len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise InvalidRequest(f"{shown!r} is not a host name", hint="use a name such as example.org or *.example.org")
    if re.fullmatch(r"\d+|0x[0-9a-f]*", labels[-1]):
        raise InvalidRequest(f"{shown!r} is an address, not a host name", hint="allow hosts by name")
    return host


def write_policy(policy: Policy) -> dict[str, Any]:
    """Write a policy for the proxy."""
    return {
        "allow": [str(rule) for rule in policy.rules],
        "upstreams": policy.upstreams,
        "traffic": asdict(policy.traffic),
    }


def read_policy(text: dict[str, Any]) -> Policy:
    """Read a policy as `write_policy` wrote it."""
    return parse_policy(text["allow"], upstreams=text["upstreams"], traffic=Traffic(**text["traffic"]))


def _parse_ports(entry: str, numbers: Sequence[str]) -> frozenset[int]:
    written = all(re.fullmatch(r"[0-9]{1,5}", number) for number in numbers)
    ports = frozenset(map(int, numbers)) if written else frozenset()
    if not ports or not all(0 < port < 65536 for port in ports) or ports & {DNS_PORT, PROXY_PORT}:
        raise InvalidRequest(f"{entry!r} names no usable port", hint="write ports as host:443 or host:80,8080")
    return ports
