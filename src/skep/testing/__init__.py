"""Contract suites that ship with Skep, for whoever writes another implementation of one of its parts.

They need pytest, and no plugin of it.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *(f"{__name__}.{name}" for name in ("commands", "jobs", "lifecycle", "promise", "shells", "terminals", "tree"))
)

from skep.testing.promise import Gap, MakeSandbox  # noqa: E402
from skep.testing.sandbox import SandboxContract  # noqa: E402

__all__ = ["Gap", "MakeSandbox", "SandboxContract"]
