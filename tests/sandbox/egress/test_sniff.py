"""Telling what a connection speaks from its first bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from skep.sandbox.egress.sniff import is_http, may_connect, plain_address, tells

REQUEST = b"GET /\xff HTTP/1.1\r\nHost: a.test\r\n\r\n"


@pytest.mark.parametrize("data", [REQUEST, b"\r\n\n" + REQUEST, b"get / http/1.0\n", b"PRI * HTTP/2.0\r\n\r\n"])
def test_http_is_known_however_badly_it_is_said(data: bytes) -> None:
    assert tells(data)
    assert is_http(data)


@given(some.integers(0, len(REQUEST)))
def test_a_part_of_a_request_is_never_taken_for_something_else(size: int) -> None:
    assert is_http(REQUEST[:size])


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-x\r\n", b"*1\r\n$4\r\nPING\r\n", b"\0\0\0\x08\x04\xd2\x16/", b"AMQP\0\0\x09\x01"]
)
def test_other_protocols_are_known_as_such(data: bytes) -> None:
    assert tells(data)
    assert not is_http(data)


def test_a_connect_is_known_from_its_first_letter_on() -> None:
    assert all(may_connect(b"CONNECT a:1 HTTP/1.1"[:size]) for size in range(1, 21))
    assert not may_connect(b"CONNECTED")
    assert not may_connect(b"GET")


@pytest.mark.parametrize(
    ("text", "plain"), [("::ffff:198.18.0.1", "198.18.0.1"), ("127.0.0.1", "127.0.0.1"), ("fe80::1%lo", "fe80::1")]
)
def test_an_address_has_one_form(text: str, plain: str) -> None:
    assert plain_address(text) == plain
