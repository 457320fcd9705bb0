"""Run benchmarks by name, or all, and write their sections of docs/performance.md: `python -m bench [name…]`.

With `--install` the rivals that a benchmark compares with may be installed for it, from Debian and PyPI.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from bench import rivals
from bench.report import Section, busy_share, write

# A benchmark is a module of this package with `measure() -> Section`.
BENCHMARKS = (
    "startup",
    "events",
    "sandbox",
    "mechanisms",
    "interpreter",
    "reach",
    "browser",
    "workspace",
    "sessions",
    "tasks",
)
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"


def main(arguments: list[str]) -> int:
    names = [argument for argument in arguments if argument != "--install"]
    rivals.may_install = names != arguments
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in names or BENCHMARKS:
        print(f"measuring {name} …", flush=True)
        busy = busy_share()
        section: Section = import_module(f"bench.{name}").measure()
        print(section.text(busy))
        write(PAGE, section, busy)
    print(f"written to {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
