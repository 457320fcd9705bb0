"""The four flags of a hive in all 16 combinations: each takes away what it says, and nothing else."""

from __future__ import annotations

import json
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


def ask(served: House, hive: str) -> Outcome:
    """Ask for something that acts, and then meets a failure of the model."""
    served.narrator.tell(f"case-{hive}", command("echo alive"), SERVER_ERROR, finish("All is well."))
    return served.ask(f"Act, and go on, case-{hive}", hive=hive)


def check(served: House, flags: Flags, outcome: Outcome) -> None:
    (seen,) = outcome.observations
    if flags.sandbox_enabled:
        assert (seen["kind"], seen["stdout"]) == ("command_ended", "alive\n")
    else:
        assert (seen["kind"], seen["failure"]) == ("trouble", "sandbox_disabled")
    if flags.self_healing_enabled:
        assert (outcome.task["status"], outcome.task["reply"]) == ("succeeded", "All is well.")
        assert outcome.healed == [("server_error", 1, "transient", "RetryNow")]
    else:
        assert (outcome.task["status"], outcome.healed, outcome.all("failure_noted")) == ("failed", [], [])
        assert "Internal server error" in outcome.task["error"]
    household = served.home / ".local/share/skep/hives" / outcome.task["hive"]

    def log() -> str:
        return "".join(file.read_text() for file in household.glob("memory/2*.md"))

    if flags.file_memory_enabled:
        until(lambda: outcome.task["id"] in log(), "the day's log")
    else:
        assert not log()


def test_each_combination_of_flags_degrades_as_documented(tmp_path: Path) -> None:
    with house(tmp_path, "openai", hives=COMBINATIONS) as served, served.serving():
        with ThreadPoolExecutor(4) as pool:
            outcomes = dict(zip(COMBINATIONS, pool.map(partial(ask, served), COMBINATIONS), strict=True))
        # Those with a memory come first: by the time of the others, theirs would have been written too.
        for hive, flags in sorted(COMBINATIONS.items(), key=lambda one: not one[1].file_memory_enabled):
            check(served, flags, outcomes[hive])
        counted = json.loads(served.skep("hive", "healing", "hyyyy", "--json").stdout)
        assert counted == {
            "by_tier": {"1": 1},
            "by_rule": {"transient": 1},
            "by_failure": {"server_error": 1},
            "heal_rates": {"server_error": 1.0},
        }
