"""What the settings and a hive let its workers do without a question."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skep.app.engine import listed_packages
from skep.config import Settings
from skep.state.accounts import utc_now
from skep.state.flags import DEFAULT
from skep.state.hives import Hive
from skep.state.upkeep import USUAL

GARDEN = Hive("hv-garden", "bees", "garden", DEFAULT, utc_now())
MIRROR = {"python_index": "https://mirror.test/simple"}


@pytest.mark.parametrize(
    ("hosts", "packages", "isolation", "listed"),
    [
        (["pypi", "npm"], {}, "namespaces", {"python", "node"}),
        (["pypi"], {}, "namespaces", {"python"}),
        (["pypi", "mirror.test"], MIRROR, "namespaces", {"python"}),
        (["pypi"], MIRROR, "namespaces", set()),
        (["pypi", "npm"], {}, "kernel", set()),
        ([], {}, "namespaces", set()),
    ],
)
def test_packages_need_no_question_where_their_hosts_are_listed_and_their_trial_is_isolated_enough(
    hosts: list[str], packages: dict[str, Any], isolation: str, listed: set[str]
) -> None:
    settings = Settings.model_validate({"policy": {"allowed_hosts": hosts}, "packages": packages})
    hive = replace(GARDEN, upkeep=USUAL.changed({"sandbox_isolation": isolation}))
    assert listed_packages(settings, hive) == listed
