"""Which hosts a rule covers, and which texts are rules at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from skep.errors import InvalidRequest
from skep.sandbox.egress.policy import (
    NAMED_SETS,
    Traffic,
    normal_host,
    parse_policy,
    parse_rule,
    parse_upstream,
    plain_host,
    read_policy,
    write_policy,
)

LABEL = some.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
HOST = some.lists(LABEL, min_size=2, max_size=4).map(".".join)


@given(HOST, some.sampled_from([80, 443, 8443]))
def test_a_host_covers_itself_alone(host: str, port: int) -> None:
    policy = parse_policy([host])
    assert policy.allows(host, port) is (port != 8443)
    for other in (f"evil{host}", f"evil-{host}", f"{host}.evil.test", f"www.{host}", host.replace(".", "x")):
        assert not policy.allows(other, port)


@given(HOST, LABEL)
def test_a_suffix_covers_what_is_below_it_and_not_itself(host: str, label: str) -> None:
    policy = parse_policy([f"*.{host}"])
    assert policy.allows(f"{label}.{host}", 443)
    assert policy.allows(f"deep.{label}.{host}", 443)
    assert not policy.allows(host, 443)
    assert not policy.allows(f"{label}{host}", 443)


@given(HOST)
def test_a_name_has_one_form(host: str) -> None:
    assert plain_host(host.upper() + ".") == host
    assert normal_host(f" {host.title()} ") == host


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "..", "a..b", "a.test..", "-a.test", "a-.test", "a b.test", "a\n.test", "a/b", "a@b.test", "a:80", "*",
        "b\u00fccher.test", "127.0.0.1", "2130706433", "0x7f000001", "a.0x7f", "1.2.3.4.", "[::1]", "::1",
        "x" * 64 + ".test", "a." * 130 + "test", "%61.test", "a.test\0",
    ],
)  # fmt: skip
def test_what_is_no_name_on_the_wire_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        plain_host(text)


@given(some.text(max_size=80))
def test_any_text_is_a_name_in_plain_letters_or_refused(text: str) -> None:
    for read in (plain_host, normal_host):
        try:
            host = read(text)
        except InvalidRequest:
            continue
        assert host == host.lower()
        assert host.isascii()
        assert plain_host(host) == host


def test_a_person_may_write_other_scripts() -> None:
    assert parse_rule("b\u00fccher.test").host == "xn--bcher-kva.test"
    assert parse_rule("\uff41llowed.test").host == "allowed.test"


@pytest.mark.parametrize(
    "entry",
    ["*.com", "*", "*.", "a.test:", "a.test:0", "a.test:65536", "a.test:x", "a.test:53", "a.test:3128", "a.test:80,",
     "http://a.test", "10.0.0.1", "a.*.test", "a.test:+80", "a.test: 80", "a.test:\u0668\u0660"],
)  # fmt: skip
def test_an_entry_that_means_nothing_is_refused(entry: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_rule(entry)


def test_named_sets_stand_for_their_hosts() -> None:
    policy = parse_policy(["pypi", "github"])
    assert policy.allows("files.pythonhosted.org", 443)
    assert policy.allows("raw.githubusercontent.com", 443)
    assert not policy.allows("registry.npmjs.org", 443)
    assert all(parse_policy([name]).rules for name in NAMED_SETS)


@given(some.lists(HOST, max_size=5), some.sampled_from(["10.0.0.1", "10.0.0.1:81", "[fd00::1]:81", "::1"]))
def test_a_policy_reads_as_it_was_written(hosts: list[str], address: str) -> None:
    entries = [host if len(host) % 2 else f"*.{host}:8443,9443" for host in hosts]
    policy = parse_policy(entries, upstreams=dict.fromkeys(hosts, address), traffic=Traffic(connections=3))
    assert read_policy(write_policy(policy)) == policy


@pytest.mark.parametrize(
    ("text", "read"),
    [("10.0.0.1", ("10.0.0.1", None)), ("10.0.0.1:81", ("10.0.0.1", 81)), ("::1", ("::1", None)),
     ("[::1]:81", ("::1", 81))],
)  # fmt: skip
def test_an_upstream_is_an_address_and_maybe_a_port(text: str, read: tuple[str, int | None]) -> None:
    assert parse_upstream(text) == read


@pytest.mark.parametrize(
    "text", ["", "host.test", "host.test:80", "10.0.0.1:99999", "10.0.0.1:x", "[::1", "0177.0.0.1"]
)
def test_an_upstream_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_policy(["a.test"], upstreams={"a.test": text})


def test_what_is_allowed_fits_in_one_line() -> None:
    assert parse_policy([]).summary() == "nothing"
    many = parse_policy([f"host-{number}.test" for number in range(20)])
    assert many.summary().endswith("host-11.test and 8 more")
