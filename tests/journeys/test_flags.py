"""The four flags of a hive in all 16 combinations: each takes away what it says, and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from itertools import product
from pathlib import Path

from tests.journeys.house import House, Outcome, command, finish, house, until
from tests.models.servers import SERVER_ERROR

from skep.state.flags import Flags


def name(flags: Flags) -> str:
    return "h" + "".join("ny"[on] for on in astuple(flags))


COMBINATIONS = {name(flags): flags for flags in (Flags(*bits) for bits in product((False, True), repeat=4))}


def ask(served: House, hive: str) -> tuple[Outcome, Outcome]:
    """Ask for two things: one that only acts, and one on whose way a model fails."""
    served.narrator.tell(f"case-{hive}-act", command("echo alive"), finish("All is well."))
    served.narrator.tell(f"case-{hive}-fail", SERVER_ERROR, finish("All is well."))
    return (
        served.ask(f"Act, case-{hive}-act", hive=hive),
        served.ask(f"Fail on the way, case-{hive}-fail", hive=hive),
    )


def check(served: House, flags: Flags, acted: Outcome, failed: Outcome) -> None:
    assert (acted.task["status"], acted.task["reply"]) == ("succeeded", "All is well.")
    (seen,) = acted.observations
    if flags.sandbox_enabled:
        assert (seen["kind"], seen["stdout"]) == ("command_ended", "alive\n")
    else:
        assert (seen["kind"], seen["failure"]) == ("trouble", "sandbox_disabled")
    if flags.self_healing_enabled:
        assert failed.task["status"] == "succeeded"
        assert failed.healed == [("server_error", 1, "transient", "RetryNow")]
    else:
        assert (failed.task["status"], failed.healed, failed.all("failure_noted")) == ("failed", [], [])
        assert "Internal server error" in failed.task["error"]
    household = served.home / ".local/share/skep/hives" / acted.task["hive"]

    def logged() -> bool:
        text = "".join(file.read_text() for file in household.glob("memory/2*.md"))
        return acted.task["id"] in text and failed.task["id"] in text

    if flags.file_memory_enabled:
        until(logged, "the day's log")
    else:
        assert not list(household.glob("memory/2*.md"))


def test_each_combination_of_flags_degrades_as_documented(tmp_path: Path) -> None:
    with house(tmp_path, "openai", hives=COMBINATIONS) as served, served.serving():
        with ThreadPoolExecutor(8) as pool:
            outcomes = dict(zip(COMBINATIONS, pool.map(partial(ask, served), COMBINATIONS), strict=True))
        for hive, flags in COMBINATIONS.items():
            check(served, flags, *outcomes[hive])
