"""Reading whom TLS is for, from hellos that real clients say and from others."""

from __future__ import annotations

import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as some

from skep.sandbox.egress.hello import Incomplete, NotHello, server_name
from skep.sandbox.egress.tls import Authority, new_authority


def hello(name: str | None) -> bytes:
    """Return what a client says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def made(*extensions: tuple[int, bytes], length_off: int = 0) -> bytes:
    """Make a hello with some extensions."""
    block = b"".join(struct.pack("!HH", kind, len(content)) + content for kind, content in extensions)
    message = b"\x03\x03" + bytes(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0" + struct.pack("!H", len(block)) + block
    whole = b"\x01" + (len(message) + length_off).to_bytes(3, "big") + message
    return b"\x16\x03\x01" + struct.pack("!H", len(whole)) + whole


def named(*names: bytes, kind: int = 0) -> tuple[int, bytes]:
    entries = b"".join(struct.pack("!BH", kind, len(name)) + name for name in names)
    return 0, struct.pack("!H", len(entries)) + entries


def test_the_name_is_read() -> None:
    assert server_name(hello("www.example.org")) == "www.example.org"
    assert server_name(hello(None)) is None
    assert server_name(made(named(b"a.test"))) == "a.test"
    assert server_name(made()) is None


def test_a_hello_may_come_in_several_records() -> None:
    whole = made(named(b"a.test"))[5:]
    pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    assert (
        server_name(b"".join(b"\x16\x03\x01" + struct.pack("!H", len(piece)) + piece for piece in pieces)) == "a.test"
    )


@given(some.data())
def test_a_part_of_a_hello_is_not_enough(data: some.DataObject) -> None:
    whole = made(named(b"a.test"), (43, b"\x02\x03\x04"))
    part = whole[: data.draw(some.integers(0, len(whole) - 1))]
    with pytest.raises(Incomplete):
        server_name(part)


@pytest.mark.parametrize(
    "data",
    [
        made(named(b"a.test"), named(b"b.test")), made(named(b"a.test", b"b.test")), made(named(b"a.test", kind=1)),
        made(named()), made(named(b"\xff.test")), made((0, b"\0")), made(length_off=-3), b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x02\0\0\x05hello", b"\x16\x03\x01\0\0", b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\0\x04\x02\0\0\0",
        b"\x16\x03\x01\0\x04\x01\xff\xff\xff", b"\x80\x2e\x01\x03\x01",
    ],
)  # fmt: skip
def test_a_hello_that_could_be_read_in_two_ways_is_refused(data: bytes) -> None:
    with pytest.raises(NotHello):
        server_name(data)


@given(some.binary(max_size=400), some.integers(0, 80), some.integers(0, 255))
def test_any_bytes_are_read_refused_or_not_enough(data: bytes, at: int, byte: int) -> None:
    changed = bytearray(made(named(b"a.test"), (43, b"\x02\x03\x04")))
    changed[at % len(changed)] = byte
    for attempt in (data, b"\x16\x03\x01" + data, bytes(changed)):
        try:
            name = server_name(attempt)
        except (NotHello, Incomplete):
            continue
        assert name is None or name.isascii()


def test_an_authority_speaks_in_the_name_of_a_host_to_who_trusts_it() -> None:
    key, certificate = new_authority()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = Authority(key, certificate).context("a.test").wrap_bio(incoming, outgoing, server_side=True)
    trusting = ssl.create_default_context(cadata=certificate.decode())
    # As Python does by itself from 3.13 on.
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    for name, trusted in (("a.test", True), ("b.test", False)):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = Authority(key, certificate).context("a.test").wrap_bio(incoming, outgoing, server_side=True)
        client = trusting.wrap_bio(outgoing, incoming, server_hostname=name)
        assert _shake(client, server) is trusted


def _shake(client: ssl.SSLObject, server: ssl.SSLObject) -> bool:
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return client.version() is not None
