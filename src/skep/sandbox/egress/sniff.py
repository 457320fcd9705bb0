"""Tell from its first bytes what a connection speaks, and from its address whom it was meant for."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

_LONGEST_METHOD = 64


def plain_address(address: str) -> str:
    """Return the address of a socket in its plain form: IPv4 where it is that."""
    parsed = ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed)


def may_connect(data: bytes) -> bool:
    """Say whether the bytes are, or could become, a CONNECT."""
    return data[:8] == b"CONNECT "[: len(data)]


def tells(data: bytes) -> bool:
    """Say whether it is clear if the first bytes are HTTP: by a whole line, or by a first word that is no method."""
    text = data.lstrip(b"\r\n")
    word = text.partition(b" ")[0]
    is_word = all(0x20 < byte < 0x7F for byte in word) and len(word) <= _LONGEST_METHOD
    return b"\n" in text or not is_word


def is_http(data: bytes) -> bool:
    """Say whether the first bytes are HTTP, of any version and however badly said. What is not clear is."""
    return not tells(data) or b"http/" in data.lstrip(b"\r\n").partition(b"\n")[0].lower()
