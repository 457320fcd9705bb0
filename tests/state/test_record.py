"""A record is canonical JSON, comes back as it went in, and refuses what JSON cannot carry."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone
from hashlib import sha256

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from skep.errors import Corrupt, InvalidRequest
from skep.state.events import Event, Failed, HiveConfigured, Noted, Prompted, parse_event
from skep.state.record import (
    GENESIS,
    MAX_BODY_BYTES,
    MAX_DEPTH,
    Draft,
    Head,
    check_id,
    draft,
    link,
    read_record,
    read_time,
    write_time,
)

AT = "2026-01-02T03:04:05.000006Z"

texts = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
some_events: st.SearchStrategy[Event] = st.one_of(
    texts.map(lambda text: Prompted(text=text)),
    st.tuples(texts, texts).map(lambda pair: Failed(error=pair[0], message=pair[1])),
    st.dictionaries(texts, values, max_size=5).map(lambda changes: HiveConfigured(changes=changes)),
)
ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,30}", fullmatch=True)


def drafted(event: Event, *, task_id: str | None = "task-1") -> Draft:
    return draft(event, hive_id="hv-a", account_id="acme", actor="cli:me", task_id=task_id)


def number(digits: str) -> int | float:
    """Read a number as JSON means it: one beyond 2**53 is a float that happens to have no fraction."""
    return int(digits) if abs(int(digits)) < 2**53 else float(digits)


@given(some_events, ids, st.none() | ids, st.integers(0, 2**53 - 2))
def test_a_record_is_canonical_and_comes_back_as_it_went_in(
    event: Event, name: str, task_id: str | None, after: int
) -> None:
    one = draft(event, hive_id=name, account_id=name, actor=name, task_id=task_id)
    sealed = one.seal(Head(after, GENESIS, AT), AT)
    assert sealed.record == rfc8785.dumps(json.loads(sealed.record, parse_int=number))
    assert sealed.record.decode() == sealed.row()["record"]
    read = read_record(sealed.row()["record"], sealed.head.hash)
    assert read == sealed.recorded()
    assert (read.event, read.seq, read.hive_id, read.task_id) == (event, after + 1, name, task_id)


def test_a_hash_covers_the_record_and_all_before_it() -> None:
    first = drafted(Noted(text="one")).seal(Head(), AT)
    second = drafted(Noted(text="two")).seal(first.head, AT)
    assert first.head.hash == sha256(bytes(32) + first.record).digest()
    assert second.head.hash == sha256(first.head.hash + second.record).digest() == link(first.head.hash, second.record)


def nested(levels: int) -> dict[str, JsonValue]:
    inner: dict[str, JsonValue] = {}
    for _ in range(levels):
        inner = {"in": inner}
    return inner


@pytest.mark.parametrize(
    "changes",
    [
        {"lone surrogate": "\ud800"},
        {"\udfff": "in a key"},
        {"nan": float("nan")},
        {"infinite": float("-inf")},
        {"large": 2**53},
        {"small": -(2**53)},
        {"digits beyond what int prints": 10**5000},
    ],
    ids=lambda changes: ascii(next(iter(changes))),
)
def test_what_json_cannot_carry_is_refused(changes: dict[str, JsonValue]) -> None:
    event = HiveConfigured(changes=changes)
    with pytest.raises(InvalidRequest, match="cannot be kept as JSON") as refusal:
        drafted(event)
    assert len(refusal.value.message) < 300
    assert "Unicode" in (refusal.value.hint or "")


def test_a_body_that_could_not_be_read_back_for_its_depth_is_refused() -> None:
    deepest = drafted(HiveConfigured(changes=nested(MAX_DEPTH - 2))).seal(Head(), AT)
    read_record(deepest.row()["record"], deepest.head.hash)
    for depth in (MAX_DEPTH - 1, 240):
        with pytest.raises(InvalidRequest, match="nested more than 100 deep"):
            drafted(HiveConfigured(changes=nested(depth)))
    with pytest.raises(InvalidRequest, match="Recursion"):
        parse_event({"type": "hive_configured", "changes": nested(5000)})


def test_a_body_with_many_brackets_side_by_side_is_not_deep() -> None:
    assert drafted(HiveConfigured(changes={"flat": [[]] * 1000, "text": "[{" * 1000}))


@pytest.mark.parametrize("text", ["\x00", "nul \x00 inside", "שלום \u202eevil", "🐝" * 10, "\u2028\u2029\x7f"])
def test_odd_but_valid_text_is_kept_to_the_letter(text: str) -> None:
    sealed = drafted(Prompted(text=text)).seal(Head(), AT)
    assert b"\x00" not in sealed.record
    assert read_record(sealed.row()["record"], sealed.head.hash).event == Prompted(text=text)


def test_a_body_up_to_the_limit_is_taken_and_one_byte_more_is_not() -> None:
    room = MAX_BODY_BYTES - len('{"text":"","thread":null}')
    assert drafted(Prompted(text="x" * room)).size_bytes >= MAX_BODY_BYTES
    with pytest.raises(InvalidRequest, match="at most 1,048,576"):
        drafted(Prompted(text="x" * (room + 1)))


def hostile_ids() -> Iterable[str]:
    return (
        "",
        "../etc",
        "a/b",
        "nul\x00",
        "a" * 10_000,
        "\u202eabc",
        "-a",
        ".",
        "..",
        'quo"te',
        "a b",
        "é",
        "a\n",
    )


@pytest.mark.parametrize("value", hostile_ids(), ids=lambda value: ascii(value[:10]))
@pytest.mark.parametrize("field", ["hive_id", "account_id", "actor", "task_id"])
def test_a_hostile_identifier_is_refused_and_shown_safely(field: str, value: str) -> None:
    filed = {"hive_id": "hv-a", "account_id": "acme", "actor": "me", "task_id": "t", field: value}
    with pytest.raises(InvalidRequest, match=field) as refusal:
        draft(Noted(text="a"), **filed)
    assert refusal.value.message.isascii()
    assert refusal.value.message.isprintable()
    assert len(refusal.value.message) < 120


def test_an_ordinary_identifier_is_returned() -> None:
    assert check_id("actor", "beekeeper:U7@example.com") == "beekeeper:U7@example.com"


@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30))])))
def test_times_have_one_form_and_come_back_equal(moment: datetime) -> None:
    text = write_time(moment)
    assert len(text) == len(AT)
    assert text.endswith("Z")
    assert read_time(text) == moment


@given(st.datetimes(timezones=st.just(UTC)), st.datetimes(timezones=st.just(UTC)))
def test_the_order_of_times_is_the_order_of_their_text(one: datetime, other: datetime) -> None:
    assert (write_time(one) < write_time(other)) == (one < other)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no time zone"):
        write_time(datetime(2026, 1, 1))


def test_a_stored_record_that_is_not_json_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="not JSON"):
        read_record('{"account', bytes(32))
