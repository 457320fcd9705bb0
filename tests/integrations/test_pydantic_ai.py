"""pydantic-ai works in Skep's workspaces, and its own suite for backends passes there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from pydantic_ai.workspaces import WorkspaceBackend, WorkspaceRef
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from skep.integrations.pydantic_ai import SkepWorkspaceBackend


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


class TestConformance(WorkspaceBackendSuite):
    @pytest.fixture
    async def made(self) -> AsyncIterator[list[SkepWorkspaceBackend]]:
        backends: list[SkepWorkspaceBackend] = []
        yield backends
        for backend in backends:
            await backend.close()

    @pytest.fixture
    def fresh_backend(self, home: Path, made: list[SkepWorkspaceBackend]) -> Callable[[], WorkspaceBackend]:
        def build() -> WorkspaceBackend:
            made.append(SkepWorkspaceBackend(home=home))
            return made[-1]

        return build

    @pytest.fixture
    def backend(self, fresh_backend: Callable[[], WorkspaceBackend]) -> WorkspaceBackend:
        return fresh_backend()

    @pytest.fixture
    def attach_backend(
        self, home: Path, made: list[SkepWorkspaceBackend]
    ) -> Callable[[WorkspaceRef], WorkspaceBackend]:
        def build(ref: WorkspaceRef) -> WorkspaceBackend:
            made.append(SkepWorkspaceBackend(ref, home=home))
            return made[-1]

        return build

    @pytest.fixture
    def destroy_environment(self) -> Callable[[WorkspaceBackend], Awaitable[None]]:
        async def destroy(backend: WorkspaceBackend) -> None:
            assert isinstance(backend, SkepWorkspaceBackend)
            await backend.destroy()

        return destroy
