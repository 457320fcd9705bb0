"""The only resolver a sandbox has: every name gets a made-up address that stands for it.

Nothing is asked of a real name server here, so nothing can be smuggled out in a question. The address tells the proxy
later which name was meant; the real one is looked up outside, when the proxy dials.
"""

from __future__ import annotations

import struct
from ipaddress import IPv4Address

from skep.errors import InvalidRequest
from skep.sandbox.egress.policy import plain_host

_FIRST = int(IPv4Address("198.18.0.0"))
_SHARE = 16_384
_SHARES = 8
#: Fewer than a share: its last addresses stand for nothing, among them the one that a sandbox has itself.
_MOST = 16_000
_TTL_S = 1
_HEADER = struct.Struct("!HHHHHH")
_A, _IN = 1, 1
_NAME_ERROR, _REFUSED, _FORMAT_ERROR = 3, 5, 1


class Names:
    """The names one sandbox has asked for, each with the address that stands for it.

    Each proxy in a row (`turn`) takes addresses of its own: one that a program still has from the proxy before
    stands for nothing, rather than for another host.
    """

    def __init__(self, turn: int = 0) -> None:
        self._first = _FIRST + turn % _SHARES * _SHARE + 1
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def address(self, name: str) -> str | None:
        """Return the address that stands for a name; None once the sandbox has asked for too many."""
        if name not in self._addresses:
            if len(self._addresses) >= _MOST:
                return None
            address = str(IPv4Address(self._first + len(self._addresses)))
            self._addresses[name], self._names[address] = address, name
        return self._addresses[name]

    def name(self, address: str) -> str | None:
        return self._names.get(address)


def answer(query: bytes, names: Names) -> bytes | None:
    """Answer one question; None for what is not a question at all."""
    if len(query) < _HEADER.size or len(query) > 1024:
        return None
    number, flags, questions, *_ = _HEADER.unpack_from(query)
    if flags & 0x8000:
        return None
    parsed = _question(query) if questions == 1 and not flags & 0x7800 else None
    if parsed is None:
        return _HEADER.pack(number, 0x8180 | _FORMAT_ERROR, 0, 0, 0, 0)
    name, kind, end = parsed
    question = query[_HEADER.size : end]
    try:
        host = plain_host(name)
    except InvalidRequest:
        return _HEADER.pack(number, 0x8180 | _NAME_ERROR, 1, 0, 0, 0) + question
    if kind != _A:
        return _HEADER.pack(number, 0x8180, 1, 0, 0, 0) + question
    address = names.address(host)
    if address is None:
        return _HEADER.pack(number, 0x8180 | _REFUSED, 1, 0, 0, 0) + question
    record = struct.pack("!HHHIH", 0xC00C, _A, _IN, _TTL_S, 4) + IPv4Address(address).packed
    return _HEADER.pack(number, 0x8180, 1, 1, 0, 0) + question + record


def _question(query: bytes) -> tuple[str, int, int] | None:
    labels, at = [], _HEADER.size
    while at < len(query) and (length := query[at]):
        if length > 63 or at + 1 + length > len(query):
            return None
        labels.append(query[at + 1 : at + 1 + length].decode("ascii", errors="replace"))
        at += 1 + length
    if at + 5 > len(query):
        return None
    kind, group = struct.unpack_from("!HH", query, at + 1)
    return (".".join(labels), kind, at + 5) if group == _IN else None
