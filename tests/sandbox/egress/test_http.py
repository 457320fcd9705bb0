"""Reading heads: whatever two readers could understand differently is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from skep.sandbox.egress.http import Malformed, parse_answer, parse_head, refusal, split_authority

GET = b"GET / HTTP/1.1\r\nHost: a.test\r\n"


def head(more: bytes = b"", first: bytes = GET) -> bytes:
    return first + more + b"\r\n"


def test_a_head_reads_as_it_was_written() -> None:
    read = parse_head(head(b"X-One: 1\r\nx-one:  2 \r\n"))
    assert read.values("x-one") == ["1", "2"]
    assert read.authority() == ("a.test", None)
    assert parse_head(read.encode()) == read


@pytest.mark.parametrize(
    "block",
    [
        head(first=b"GET / HTTP/2.0\r\nHost: a\r\n"), head(first=b"get / HTTP/1.1\r\n"),
        head(first=b"GET  / HTTP/1.1\r\n"),
        head(first=b"GET /\r\n"), head(first=b"\r\nGET / HTTP/1.1\r\n"), head(first=b"GET /\x00 HTTP/1.1\r\n"),
        head(b" folded: 1\r\n"), head(b"\tfolded\r\n"), head(b"Name : 1\r\n"), head(b"Na me: 1\r\n"), head(b": 1\r\n"),
        head(b"X: a\nY: b\r\n"), head(b"X: a\rY: b\r\n"), head(b"X: \x00\r\n"), head(b"no colon\r\n"),
        head(b"X: 1\r\n" * 201),
    ],
)  # fmt: skip
def test_a_malformed_head_is_refused(block: bytes) -> None:
    with pytest.raises(Malformed):
        parse_head(block)


@pytest.mark.parametrize(
    "more",
    [
        b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n", b"Content-Length: 1\r\nContent-Length: 1\r\n",
        b"Content-Length: 1, 1\r\n", b"Content-Length: -1\r\n", b"Content-Length: +1\r\n", b"Content-Length: 0x1\r\n",
        b"Content-Length: \r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", b"Transfer-Encoding: \x0bchunked\r\n",
    ],
)  # fmt: skip
def test_a_body_that_could_end_in_two_places_is_refused(more: bytes) -> None:
    with pytest.raises(Malformed):
        _ = parse_head(head(more)).framing


def test_a_body_ends_after_its_length_or_its_last_chunk() -> None:
    assert parse_head(head()).framing == 0
    assert parse_head(head(b"Content-Length: 12\r\n")).framing == 12
    assert parse_head(head(b"Transfer-Encoding: Chunked\r\n")).framing == "chunks"
    old = b"GET / HTTP/1.0\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(Malformed):
        _ = parse_head(old).framing


@pytest.mark.parametrize(
    "target",
    ["http://b.test/", "https://a.test/", "http://a.test:81/", "http://u@a.test/", "http://a.test@b.test/",
     "a.test:443", "http://[", "http:///", "//b.test", "*", "http:a.test", "ftp://a.test/"],
)  # fmt: skip
def test_an_address_that_disagrees_with_the_host_is_refused(target: str) -> None:
    block = f"GET {target} HTTP/1.1\r\nHost: a.test\r\n\r\n".encode()
    if target == "//b.test":
        assert parse_head(block).authority() == ("a.test", None)  # a path, to everybody
        return
    with pytest.raises(Malformed):
        parse_head(block).authority()


def test_an_address_that_agrees_is_sent_on_as_a_path() -> None:
    block = b"GET http://A.test:80/p?q=1#f HTTP/1.1\r\nHost: a.test\r\nProxy-Authorization: x\r\n\r\n"
    read = parse_head(block)
    assert read.authority() == ("a.test", None)
    assert read.encode() == b"GET /p?q=1 HTTP/1.1\r\nHost: a.test\r\n\r\n"


@pytest.mark.parametrize("hosts", [b"", b"Host: a.test\r\nHost: a.test\r\n"])
def test_a_request_has_one_host(hosts: bytes) -> None:
    with pytest.raises(Malformed):
        parse_head(b"GET / HTTP/1.1\r\n" + hosts + b"\r\n").authority()


def test_a_field_goes_with_what_connection_says_of_it() -> None:
    read = parse_head(head(b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n"))
    assert read.without("upgrade", "http2-settings").encode() == head(b"Connection: close\r\n")
    only = parse_head(head(b"Connection: Upgrade\r\nUpgrade: h2c\r\n"))
    assert only.without("upgrade").encode() == head()


@pytest.mark.parametrize(
    ("block", "method", "framing"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", "GET", 3),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", "HEAD", 0),
        (b"HTTP/1.1 204 No\r\n\r\n", "GET", 0), (b"HTTP/1.1 304\r\nContent-Length: 3\r\n\r\n", "GET", 0),
        (b"HTTP/1.1 100 Go on\r\n\r\n", "POST", 0), (b"HTTP/1.0 200 OK\r\n\r\n", "GET", "end"),
        (b"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n", "GET", "chunks"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\n", "GET", 3),
    ],
)  # fmt: skip
def test_an_answer_says_where_it_ends(block: bytes, method: str, framing: object) -> None:
    assert parse_answer(block).framing(method) == framing


def test_an_answer_in_chunks_loses_its_length() -> None:
    block = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n"
    assert parse_answer(block).encode() == b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "block", [b"HTTP/2 200\r\n\r\n", b"ICY 200 OK\r\n\r\n", b"HTTP/1.1 20 OK\r\n\r\n", b"\r\n\r\n"]
)
def test_an_answer_that_is_not_http_is_refused(block: bytes) -> None:
    with pytest.raises(Malformed):
        parse_answer(block)


@given(some.binary(max_size=200))
def test_any_bytes_are_a_head_that_reads_the_same_again_or_refused(data: bytes) -> None:
    try:
        read = parse_head(b"GET / HTTP/1.1\r\nHost: a.test\r\n" + data + b"\r\n\r\n")
        authority, framing = read.authority(), read.framing
    except Malformed:
        return
    again = parse_head(read.encode())
    assert (again.authority(), again.framing) == (authority, framing)
    assert read.encode().count(b"\n") == read.encode().count(b"\r\n")


@given(some.text(alphabet=some.characters(min_codepoint=33, max_codepoint=255), max_size=60))
def test_any_address_is_read_or_refused(target: str) -> None:
    try:
        read = parse_head(f"GET {target} HTTP/1.1\r\nHost: a.test\r\n\r\n".encode("latin-1"))
        host, _ = read.authority()
    except Malformed:
        return
    assert host == "a.test"
    assert read.encode().startswith((b"GET /", b"GET * "))


@pytest.mark.parametrize("text", ["a:", "a:x", "a:0", "a:65536", "a:-1", "[::1]:", "a:80:"])
def test_a_port_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        split_authority(text)


def test_a_refusal_is_a_whole_answer_of_one_line_and_a_text() -> None:
    answer = refusal("403", "blocked: \u00fc\nand why")
    block, _, body = answer.partition(b"\r\n\r\n")
    read = parse_answer(block + b"\r\n\r\n")
    assert (read.status, read.framing("GET")) == (403, len(body))
    assert body.decode() == "blocked: \u00fc\nand why\n"
