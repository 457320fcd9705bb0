"""The resolver inside: every question answered here, none passed on."""

from __future__ import annotations

import struct
from ipaddress import ip_address, ip_network

from hypothesis import given
from hypothesis import strategies as some

from skep.sandbox.egress.dns import Names, answer

MADE_UP = ip_network("198.18.0.0/15")


def question(name: str, kind: int = 1, number: int = 7) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!HHHHHH", number, 0x0100, 1, 0, 0, 0) + labels + struct.pack("!BHH", 0, kind, 1)


def code(reply: bytes | None) -> int:
    assert reply is not None
    return int(struct.unpack_from("!H", reply, 2)[0]) & 15


def test_a_name_gets_an_address_that_stands_for_it() -> None:
    names = Names()
    reply = answer(question("WWW.Example.ORG"), names)
    assert reply is not None
    assert reply[:2] == struct.pack("!H", 7)
    address = ip_address(reply[-4:])
    assert address in MADE_UP
    assert names.name(str(address)) == "www.example.org"
    assert answer(question("www.example.org"), names) == reply[:12] + question("www.example.org")[12:] + reply[-16:]


def test_other_kinds_get_an_empty_answer() -> None:
    for kind in (2, 15, 16, 28, 65, 255):
        reply = answer(question("www.example.org", kind), Names())
        assert code(reply) == 0
        assert reply is not None
        assert struct.unpack_from("!H", reply, 6)[0] == 0


def test_what_is_no_name_does_not_exist() -> None:
    for name in ("a..b".replace("..", ".-"), "10.in-addr.1", "ex ample.test"):
        assert code(answer(question(name), Names())) == 3


def test_there_is_an_end_to_made_up_addresses() -> None:
    names = Names(turn=7)
    addresses = [names.address(f"host-{number}.test") for number in range(16_000)]
    assert len(set(addresses)) == 16_000
    assert all(ip_address(str(address)) in MADE_UP for address in addresses)
    assert "198.19.255.254" not in addresses
    assert code(answer(question("one-more.test"), names)) == 5
    assert code(answer(question("host-5.test"), names)) == 0


def test_each_proxy_in_a_row_takes_other_addresses() -> None:
    seen = {Names(turn).address("a.test") for turn in range(8)}
    assert len(seen) == 8


@given(some.binary(max_size=300))
def test_any_datagram_is_answered_or_dropped(data: bytes) -> None:
    reply = answer(data, Names())
    assert reply is None or (reply[:2] == data[:2] and reply[2] & 0x80)


@given(some.binary(max_size=60), some.integers(0, 65535))
def test_any_question_leaves_the_answer_no_longer_than_itself_and_an_address(tail: bytes, flags: int) -> None:
    data = struct.pack("!HHHHHH", 1, flags, 1, 0, 0, 0) + tail
    reply = answer(data, Names())
    assert reply is None or len(reply) <= len(data) + 16
