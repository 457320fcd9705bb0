"""Tell addresses of the public internet from all others.

The lists are written out here because what Python's `ipaddress` calls global differs between its versions: some of
them take the metadata service at 192.0.0.192, site-local or IPv4-compatible addresses for public ones.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_NOT_PUBLIC = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
        "168.63.129.16/32",  # public by number, but answered by the cloud's own host: Azure's platform address
    )
)  # fmt: skip
#: All that has been given out for use on the internet; loopback, link-local, private and the like lie outside.
_GIVEN_OUT = IPv6Network("2000::/3")
#: Protocols and documentation, with Teredo and 6to4 among them: tunnels in which an IPv4 address hides.
_NOT_PUBLIC_6 = tuple(IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
#: Where networks without IPv4 show it: its last 32 bits are what is dialled in the end.
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)


def is_public(text: str) -> bool:
    """Say whether an address may be dialled: global, unicast, and not another one in disguise."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC)
    return _is_public_6(address)


def is_ours(text: str) -> bool:
    """Say whether an address is one of this machine's own, which may be public and still lead behind its firewall."""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((text, 9))  # sends nothing; the kernel only chooses where it would send from
        except OSError:
            return False
        source = ip_address(probe.getsockname()[0])
        return source == ip_address(text) or source.is_loopback


def _is_public_6(address: IPv6Address) -> bool:
    if address.scope_id is not None:
        return False
    if address.ipv4_mapped is not None:
        return is_public(str(address.ipv4_mapped))
    inner = IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _NAT64:
        return is_public(str(inner))
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP and not is_public(str(inner)):
        return False
    return address in _GIVEN_OUT and not any(address in network for network in _NOT_PUBLIC_6)
