from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skep.errors import InvalidRequest
from skep.sessions.key import KEY_BYTES, check_key, hive_key, session_id

GOOD = [
    "slack:C1:1700.1",
    "dm:U7",
    "cli:default",
    "api:any thing; rm -rf /",
    "api:../../etc/passwd",
    "api:żółć",
    "api:%00",
]
BAD = [
    "", "default", ":x", "cli:", "cli:  ", "CLI:x", "1cli:x", "cli :x", "api:a\0b", "api:a\nb", "api:\x1b[31m",
    "api:\u202eevil", "api:zero\u200bwidth", "api:\ud800", "api:" + "x" * 10_000, "x" * 40 + ":y",
]  # fmt: skip


@pytest.mark.parametrize("key", GOOD)
def test_a_key_is_taken_as_it_is(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize("key", BAD, ids=lambda key: ascii(key)[:20])
def test_a_key_that_cannot_be_shown_or_split_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_key(key)
    assert refused.value.message.isascii() and refused.value.message.isprintable()
    assert len(refused.value.message) < 200


def test_the_longest_key_is_counted_in_bytes() -> None:
    assert check_key("api:" + "ż" * ((KEY_BYTES - 4) // 2))
    with pytest.raises(InvalidRequest):
        check_key("api:" + "ż" * ((KEY_BYTES - 4) // 2 + 1))


def test_the_id_of_a_session_never_changes() -> None:
    assert session_id("bees", "hv-1", "cli:default") == "31038292-adae-5673-acbe-157032bf9fa7"


TEXTS = st.text(max_size=40)


@given(st.tuples(TEXTS, TEXTS, TEXTS), st.tuples(TEXTS, TEXTS, TEXTS))
def test_two_sessions_have_one_id_only_if_they_are_one(
    first: tuple[str, str, str], second: tuple[str, str, str]
) -> None:
    if any("\0" in part for part in (*first, *second)):
        return  # no account, hive or key has one
    try:
        ids = session_id(*first), session_id(*second)
    except UnicodeEncodeError:
        return  # a lone surrogate, which no checked key has
    assert (ids[0] == ids[1]) == (first == second)


@pytest.mark.parametrize("key", GOOD)
def test_the_id_of_a_session_can_name_a_folder(key: str) -> None:
    assert set(session_id("bees", "hv-1", key)) <= set("0123456789abcdef-")


def test_the_key_of_a_hive_is_a_key() -> None:
    assert check_key(hive_key("hv-aaaaaaaaaaaaaaaa")) == "hive:hv-aaaaaaaaaaaaaaaa"
