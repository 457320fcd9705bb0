"""The page about mechanisms says what the suites list: no gap is left out, and none is told that there is not."""

from __future__ import annotations

import re
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from skep.sandbox.mechanisms import MECHANISMS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/mechanisms.md").read_text()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("scripts_mechanisms", str(ROOT / "scripts/mechanisms"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = module_from_spec(spec)
    loader.exec_module(module)
    return module


def told(mechanism: str) -> list[str]:
    """The gaps that the page lists for a mechanism."""
    section = PAGE.split(f"## What {mechanism} does not keep\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("- ")]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_page_lists_the_gaps_that_the_suite_has(script: ModuleType, mechanism: str) -> None:
    suite = script.suite(mechanism)
    listed = [script.gap_line(promise, gap) for promise, gap in sorted(suite.gaps.items())]
    assert told(mechanism) == listed, f"run: .venv/bin/python scripts/mechanisms {mechanism}"


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_suite_was_run_whole_and_broke_no_promise_that_is_not_a_gap(mechanism: str) -> None:
    row = re.search(rf"^\| `{mechanism}` \| {MECHANISMS[mechanism].isolation} \|(.*)\|$", PAGE, re.MULTILINE)
    assert row is not None
    total, kept, gaps, untried, unrun, broken = (int(cell) for cell in row[1].split("|"))
    assert (unrun, broken) == (0, 0)
    assert kept > 200 and kept + gaps + untried == total
    assert bool(gaps + untried) == bool(told(mechanism))
