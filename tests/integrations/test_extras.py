"""Who has not installed a framework is told how, and nobody else loads one."""

from __future__ import annotations

import subprocess
import sys

import pytest

ABSENT = """
import sys
sys.modules[{package!r}] = None
try:
    import skep.integrations.{package}
except Exception as error:
    print(type(error).__name__, "|", error, "|", error.hint)
"""

LOADED = """
import sys
import skep.cli.app
print({"inspect_ai", "pydantic_ai", "deepagents", "skep.integrations"} & {*sys.modules})
"""


@pytest.mark.parametrize(
    ("package", "name"), [("inspect_ai", "inspect"), ("pydantic_ai", "pydantic-ai"), ("deepagents", "deepagents")]
)
def test_a_missing_framework_is_named_with_the_way_to_install_it(package: str, name: str) -> None:
    ran = subprocess.run([sys.executable, "-c", ABSENT.format(package=package)], capture_output=True, text=True)
    install = f"pip install 'skep[{name}]'"
    assert ran.stdout == f"Unavailable | the package {package} is not installed: {install} | {install}\n", ran.stderr


def test_skep_and_its_command_line_load_no_framework() -> None:
    ran = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert ran.stdout == "set()\n", ran.stderr
