"""The sandbox contract, kept by a workspace in layers: what concerns files, and a sandbox's life and death.

How commands run is the same without layers, where all of the contract is tried.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.contracts.test_sandbox import kill_first_process

from skep.sandbox.creation import Creation
from skep.sandbox.layering import layering
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Stack
from skep.testing.lifecycle import DeathPromises, LifePromises
from skep.testing.tree import FilePromises, HostileFilePromises, WatchPromises


class TestLayered(FilePromises, HostileFilePromises, WatchPromises, LifePromises, DeathPromises):
    @pytest.fixture
    def make_sandbox(self, tmp_path: Path) -> Callable[..., Creation]:
        if layering() == "none":
            pytest.skip("this kernel mounts no overlay for an ordinary user")
        layer = tmp_path / "layer"
        layer.mkdir()

        def make(folder: str | os.PathLike[str] | None = None, **options: object) -> Creation:
            top = Path(folder) if folder is not None else tmp_path / os.urandom(4).hex()
            for part in ("tree", "work"):
                (top / part).mkdir(parents=True, exist_ok=True)
            stack = Stack(str(top / "tree"), str(top / "work"), (str(layer),))
            return Sandbox.create(stack=stack, **options)  # type: ignore[arg-type]

        return make

    async def destroy(self, sandbox: Sandbox) -> None:
        kill_first_process(sandbox)
