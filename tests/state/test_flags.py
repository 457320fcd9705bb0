from __future__ import annotations

from collections import Counter
from hashlib import sha256

import pytest

from skep.errors import InvalidRequest
from skep.state.database import Database
from skep.state.flags import FLAGS, Flags, Rollouts, bucket

ALL_ON = Flags(skill_authoring_enabled=True)


def test_everything_is_on_at_first_but_the_writing_of_skills() -> None:
    assert [flag for flag in FLAGS if not getattr(Flags(), flag)] == ["skill_authoring_enabled"]


def test_an_account_has_the_same_place_for_ever() -> None:
    assert bucket("sandbox_enabled", "bees") == int(sha256(b"sandbox_enabled:bees").hexdigest()[:16], 16) % 100
    assert [bucket(flag, "bees") for flag in FLAGS] == [19, 60, 72, 24]


def test_accounts_spread_evenly_and_differently_for_each_flag() -> None:
    names = [f"account-{number}" for number in range(20_000)]
    for flag in FLAGS:
        assert all(120 < count < 290 for count in Counter(bucket(flag, name) for name in names).values())
    same = sum(bucket(FLAGS[0], name) == bucket(FLAGS[1], name) for name in names)
    assert 120 < same < 290


async def test_a_flag_is_rolled_out_to_all_until_told_otherwise(database: Database) -> None:
    rollouts = Rollouts(database)
    assert await rollouts.percents() == dict.fromkeys(FLAGS, 100)
    assert await rollouts.in_effect(ALL_ON, "bees") == ALL_ON


async def test_no_account_is_reached_by_zero_percent(database: Database) -> None:
    rollouts = Rollouts(database)
    for flag in FLAGS:
        await rollouts.set(flag, 0)
    off = Flags(**dict.fromkeys(FLAGS, False))
    assert [await rollouts.in_effect(ALL_ON, f"a{number}") for number in range(20)] == [off] * 20


async def test_an_account_is_reached_at_its_own_percentage_and_stays_so(database: Database) -> None:
    rollouts = Rollouts(database)
    place = bucket("sandbox_enabled", "bees")
    reached = []
    for percent in (0, place, place + 1, 100):
        await rollouts.set("sandbox_enabled", percent)
        reached.append((await rollouts.in_effect(ALL_ON, "bees")).sandbox_enabled)
    assert reached == [False, False, True, True]


async def test_a_roll_out_turns_nothing_on_that_is_off_for_the_hive(database: Database) -> None:
    assert await Rollouts(database).in_effect(Flags(), "bees") == Flags()


@pytest.mark.parametrize("percent", [-1, 101, True, 1.5, "50"])
async def test_what_is_no_percentage_is_refused(database: Database, percent: int) -> None:
    rollouts = Rollouts(database)
    with pytest.raises(InvalidRequest, match="not a percentage"):
        await rollouts.set("sandbox_enabled", percent)
    assert (await rollouts.percents())["sandbox_enabled"] == 100


async def test_a_flag_that_does_not_exist_is_refused(database: Database) -> None:
    with pytest.raises(InvalidRequest, match="no flag") as caught:
        await Rollouts(database).set("nonsense", 1)
    assert "sandbox_enabled" in (caught.value.hint or "")
