"""Where a placeholder is worth something, and what becomes of the value in an answer."""

from __future__ import annotations

from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as some

from skep.errors import InvalidRequest
from skep.sandbox.egress.http import Head, parse_head
from skep.sandbox.egress.placeholders import Finder, Mask, Placeholder, readable, strays, swap, unusable

KEY = Placeholder.make("API_KEY", host="api.test:443", header="Authorization")
PIECES = some.lists(some.integers(1, 9), max_size=40)


def request(*fields: str, target: str = "/") -> Head:
    return parse_head("\r\n".join([f"GET {target} HTTP/1.1", "Host: api.test", *fields, "", ""]).encode())


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


def test_the_value_goes_into_its_own_header_alone() -> None:
    head, secret = swap(
        request(f"AUTHORIZATION: Bearer {KEY.text}", f"X: {KEY.text}", "Range: bytes=0-1"), KEY, "the value"
    )
    assert head.values("authorization") == ["Bearer the value"]
    assert head.values("x") == [KEY.text]
    assert not head.values("range")
    assert secret == {b"the value"}


def test_the_value_goes_into_a_user_name_and_password() -> None:
    given_code = b64encode(f"user:{KEY.text}".encode()).decode()
    head, secret = swap(request(f"Authorization: Basic {given_code}"), KEY, "the value")
    code = b64encode(b"user:the value")
    assert head.values("authorization") == [f"Basic {code.decode()}"]
    assert secret == {b"the value", code}


def test_an_answer_is_asked_for_that_can_be_read() -> None:
    head = readable(request("Accept-Encoding: gzip", "Sec-WebSocket-Extensions: permessage-deflate"))
    assert head.values("accept-encoding") == ["identity"]
    assert not head.values("sec-websocket-extensions")


@pytest.mark.parametrize(
    ("host", "port", "secure", "strayed"),
    [("api.test", 443, True, 0), ("api.test", 443, False, 1), ("api.test", 8443, True, 1), ("b.test", 443, True, 1)],
)
def test_a_placeholder_is_at_home_in_one_place(host: str, port: int, secure: bool, strayed: int) -> None:
    head = request(f"Authorization: Bearer {KEY.text}")
    assert len(strays(head, [KEY], host=host, port=port, secure=secure)) == strayed


def test_a_placeholder_strays_into_addresses_names_and_encodings() -> None:
    code = b64encode(KEY.text.encode()).decode()
    head = request(f"X-{KEY.text}: 1", f"Y: Basic {code}", target=f"/?key={KEY.text}")
    assert len(strays(head, [KEY], host="api.test", port=443, secure=True)) == 3


@pytest.mark.parametrize(
    "value",
    ["a\r\nX: y", "a\nb-long-one", "short", "", "tab\there-it-is", "sch\u00f6ner-wert", None, 12, " padded-value"],
)
def test_a_value_that_no_header_can_hold_is_not_used(value: object) -> None:
    assert unusable(value)


def test_an_ordinary_value_is_used() -> None:
    assert unusable("sk-0123456789 with a blank~") is None


@pytest.mark.parametrize(
    ("name", "host", "header"),
    [("A", "*.test.org", "X"), ("A", "10.0.0.1", "X"), ("A", "a.test", "Host"), ("A", "a.test", "X: y"),
     ("A", "a.test", ""), ("A", "a.test", "Content-Length"), ("A=B", "a.test", "X"), ("", "a.test", "X")],
)  # fmt: skip
def test_a_secret_for_no_place_is_refused(name: str, host: str, header: str) -> None:
    with pytest.raises(InvalidRequest):
        Placeholder.make(name, host=host, header=header)


@given(some.binary(max_size=30), some.binary(max_size=30), PIECES)
def test_a_text_is_found_however_it_is_cut(before: bytes, after: bytes, sizes: list[int]) -> None:
    finder = Finder([b"needle-in-hay"])
    found = [text for piece in cut(before + b"needle-in-hay" + after, sizes) for text in finder.found(piece)]
    assert found == [b"needle-in-hay"]


@given(some.lists(some.sampled_from([b"secret", b"sec", b"ret", b"se", b"hay", b"ss"]), max_size=12), PIECES)
def test_a_mask_lets_no_secret_through_and_changes_nothing_else(words: list[bytes], sizes: list[int]) -> None:
    data, mask = b"".join(words), Mask([b"secret"])
    passed = b"".join([*(mask(piece) for piece in cut(data, sizes)), mask.rest()])
    assert passed == data.replace(b"secret", b"******")


@given(some.binary(max_size=60), PIECES)
def test_a_mask_of_several_secrets_keeps_the_length(data: bytes, sizes: list[int]) -> None:
    mask = Mask([b"ab", b"abc", b"bca"])
    passed = b"".join([*(mask(piece) for piece in cut(data, sizes)), mask.rest()])
    assert len(passed) == len(data)
    assert b"abc" not in passed


def test_a_mask_without_secrets_passes_everything_at_once() -> None:
    mask = Mask([])
    assert not mask
    assert mask(b"anything") == b"anything"
