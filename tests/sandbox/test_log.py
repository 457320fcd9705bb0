"""The kept output of a background job."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from skep.sandbox.log import Log

unkept = settings(database=None)  # the tests may run where nothing can be written
chunks = st.lists(st.binary(min_size=1, max_size=50), max_size=40)


@unkept
@given(chunks, st.integers(1, 64), st.integers(0, 2500))
def test_from_any_cursor_the_end_of_the_output_is_given_and_the_rest_is_said_to_be_missed(
    written: list[bytes], kept: int, cursor: int
) -> None:
    log = Log(kept)
    for chunk in written:
        log.append(chunk)
    whole = b"".join(written)
    excerpt = log.read(cursor)
    assert whole.endswith(excerpt.data)
    assert excerpt.cursor == len(whole)
    if cursor <= len(whole):
        assert cursor + excerpt.missed + len(excerpt.data) == len(whole)
    else:
        assert excerpt.data == b""


@unkept
@given(chunks, st.integers(1, 64))
def test_at_least_what_is_promised_is_kept_and_never_much_more(written: list[bytes], kept: int) -> None:
    log = Log(kept)
    for chunk in written:
        log.append(chunk)
        assert len(log.read().data) <= 2 * kept + 50
    assert len(log.read().data) >= min(kept, sum(map(len, written)))


@unkept
@given(chunks)
def test_reading_on_from_each_cursor_gives_the_output_once(written: list[bytes]) -> None:
    log, cursor, seen = Log(), 0, b""
    for chunk in written:
        log.append(chunk)
        excerpt = log.read(cursor)
        cursor, seen = excerpt.cursor, seen + excerpt.data
    assert seen == b"".join(written)


def test_a_cursor_before_the_beginning_is_the_beginning() -> None:
    log = Log()
    log.append(b"abc")
    assert (log.read(-5).data, log.read(-5).missed) == (b"abc", 0)


async def test_followers_get_what_was_and_what_comes_and_end_with_the_log() -> None:
    log = Log()
    log.append(b"early ")
    followers = [asyncio.ensure_future(_followed(log, cursor)) for cursor in (0, 3, 6)]
    for chunk in (b"one ", b"two ", b"three"):
        await asyncio.sleep(0)
        log.append(chunk)
    log.close()
    whole = b"early one two three"
    assert await asyncio.gather(*followers) == [whole, whole[3:], whole[6:]]
    assert await _followed(log, 0) == whole


async def test_a_follower_that_falls_behind_goes_on_with_what_is_kept() -> None:
    log = Log(10)
    following = aiter(log.follow())
    log.append(b"first")
    assert await anext(following) == b"first"
    log.append(b"x" * 100)
    log.append(b"last")
    log.close()
    rest = b"".join([chunk async for chunk in following])
    assert rest.endswith(b"last")


async def _followed(log: Log, cursor: int) -> bytes:
    return b"".join([chunk async for chunk in log.follow(cursor)])
