"""Tell addresses of the public internet from all others."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

#: Public by number, but answered by the cloud's own host: Azure's platform address.
_METADATA = frozenset({IPv4Address("168.63.129.16")})
#: Prefixes under which an IPv4 address hides in an IPv6 one, and where it starts (in bits from the right).
_TRANSLATED = ((IPv6Network("64:ff9b::/96"), 0), (IPv6Network("64:ff9b:1::/48"), 0), (IPv6Network("2002::/16"), 80))


def is_public(text: str) -> bool:
    """Say whether an address may be dialled: global, unicast, and not another one in disguise."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return all(_plainly_public(form) for form in _forms(address))


def _forms(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    forms: list[IPv4Address | IPv6Address] = [address]
    if address.teredo is not None:
        forms += address.teredo
    forms += [IPv4Address(int(address) >> shift & 0xFFFFFFFF) for prefix, shift in _TRANSLATED if address in prefix]
    return forms


def _plainly_public(address: IPv4Address | IPv6Address) -> bool:
    return address.is_global and not address.is_multicast and address not in _METADATA
