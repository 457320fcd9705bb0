"""The four flags of a hive in all 16 combinations: each takes away what it says, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from itertools import product

import pytest
from tests.journeys.house import House, Outcome, command, finish, house
from tests.models.servers import SERVER_ERROR

from skep.state.flags import Flags


def name(flags: Flags) -> str:
    return "h" + "".join("ny"[on] for on in astuple(flags))


COMBINATIONS = {name(flags): flags for flags in (Flags(*bits) for bits in product((False, True), repeat=4))}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with house(tmp_path_factory.mktemp("flags"), "openai", hives=COMBINATIONS) as made, made.serving():
        yield made


@pytest.fixture(scope="module")
def outcomes(served: House) -> dict[str, tuple[Outcome, Outcome]]:
    """What became of two prompts in each hive: one that only acts, and one on whose way a model fails."""

    def ask(hive: str) -> tuple[Outcome, Outcome]:
        served.narrator.tell(f"case-{hive}-act", command("echo alive"), finish("All is well."))
        served.narrator.tell(f"case-{hive}-fail", SERVER_ERROR, finish("All is well."))
        return (
            served.ask(f"Act, case-{hive}-act", hive=hive),
            served.ask(f"Fail on the way, case-{hive}-fail", hive=hive),
        )

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(COMBINATIONS, pool.map(ask, COMBINATIONS), strict=True))


@pytest.mark.parametrize("hive", COMBINATIONS)
def test_each_combination_of_flags_degrades_as_documented(
    served: House, outcomes: dict[str, tuple[Outcome, Outcome]], hive: str
) -> None:
    flags, (acted, failed) = COMBINATIONS[hive], outcomes[hive]
    assert (acted.task["status"], acted.task["reply"]) == ("succeeded", "All is well.")
    (seen,) = acted.observations
    if flags.sandbox_enabled:
        assert (seen["kind"], seen["stdout"]) == ("command_ended", "alive\n")
    else:
        assert (seen["kind"], seen["failure"]) == ("trouble", "sandbox_disabled")
    if flags.self_healing_enabled:
        assert (failed.task["status"], failed.healed) == (
            "succeeded",
            [("server_error", 1, "transient", "RetryNow")],
        )
    else:
        assert (failed.task["status"], failed.healed, failed.all("failure_noted")) == ("failed", [], [])
        assert "500" in failed.task["error"]
    logs = list((served.home / ".local/share/skep/hives" / acted.task["hive"] / "memory").glob("2*.md"))
    assert bool(logs) == flags.file_memory_enabled
