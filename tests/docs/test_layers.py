"""The layers are real: an import that goes up, or in a circle, is rejected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package and of the rules on it."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "bin"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    return subprocess.run(
        [program, "--no-cache"], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def test_the_tree_as_it_is_keeps_the_rules(tree: Path) -> None:
    assert lint(tree).returncode == 0


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("errors.py", "import skep.state.database"),
        ("sandbox/limits.py", "import skep.state.database"),
        ("config/paths.py", "import skep.cli.run"),
        ("state/record.py", "import skep.state.log"),
    ],
)
def test_a_planted_import_is_rejected(tree: Path, file: str, line: str) -> None:
    planted = tree / "src/skep" / file
    planted.write_text(planted.read_text() + f"\n\ndef planted() -> None:\n    {line}\n")
    ran = lint(tree)
    assert ran.returncode != 0
    assert "broken" in ran.stdout


def test_a_package_without_a_place_is_rejected(tree: Path) -> None:
    (tree / "src/skep/utils.py").write_text('"""Nobody said where this belongs."""\n')
    assert lint(tree).returncode != 0
