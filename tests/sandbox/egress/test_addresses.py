"""Which addresses are public."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as some

from skep.sandbox.egress.addresses import is_ours, is_public


@pytest.mark.parametrize("text", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet_are_public(text: str) -> None:
    assert is_public(text)


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0", "0.1.2.3", "10.255.255.255", "100.64.0.1", "100.127.255.255", "127.255.255.254", "169.254.169.254",
        "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.19.255.255",
        "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "168.63.129.16",
        "::", "::1", "::7f00:1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b:1::1", "100::1", "2001::1",
        "2001:db8::1", "2002:0808:0808::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%lo",
        "fec0::1", "ff02::1", "2606:4700::5efe:10.0.0.1", "2606:4700::1%lo",
        "", "localhost", "0177.0.0.1", "2130706433", "127.1", "8.8.8.8 ", "08.8.8.8",
    ],
)  # fmt: skip
def test_all_others_are_not(text: str) -> None:
    assert not is_public(text)


@given(some.integers(0, 2**32 - 1))
def test_an_address_in_disguise_is_as_public_as_itself(number: int) -> None:
    plain = is_public(str(IPv4Address(number)))
    for prefix in ("::ffff:0:0", "64:ff9b::"):
        assert is_public(str(IPv6Address(int(IPv6Address(prefix)) | number))) is plain


@given(some.integers(0, 2**128 - 1))
def test_public_is_never_what_python_calls_private(number: int) -> None:
    address = IPv6Address(number)
    if is_public(str(address)) and address.ipv4_mapped is None:
        assert not (address.is_private or address.is_multicast or address.is_loopback or address.is_link_local)


@given(some.text(max_size=40))
def test_any_text_is_answered(text: str) -> None:
    assert is_public(text) in (True, False)


def test_this_machine_knows_its_own_addresses() -> None:
    assert is_ours("127.0.0.1")
    assert not is_ours("192.0.2.77")
