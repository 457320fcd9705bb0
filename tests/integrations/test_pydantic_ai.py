"""pydantic-ai works in Skep's workspaces, and its own suite for backends passes there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.workspaces import (
    WorkspaceBackend,
    WorkspaceOutputLimitError,
    WorkspaceReadOnlyError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from skep import Workspaces
from skep.errors import SandboxLost
from skep.integrations.pydantic_ai import SkepWorkspace, SkepWorkspaceBackend
from skep.sandbox.blocking import elsewhere


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


@pytest.fixture
async def backend(home: Path) -> AsyncIterator[SkepWorkspaceBackend]:
    made = SkepWorkspaceBackend(home=home)
    yield made
    await made.close()


def calls(*wanted: tuple[str, dict[str, Any]]) -> FunctionModel:
    """Give a model that calls these tools one after the other, and then repeats what the last one said."""
    left = list(wanted)

    def reply(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if left:
            return ModelResponse(parts=[ToolCallPart(*left.pop(0))])
        last = messages[-1].parts[-1]
        assert isinstance(last, ToolReturnPart)
        return ModelResponse(parts=[TextPart(str(last.content))])

    return FunctionModel(reply)


async def shell(ctx: RunContext[None], command: str) -> str:
    """Run a command."""
    result = await ctx.workspace.run(command, shell=True)
    return result.stdout + result.stderr


async def test_an_agent_works_in_the_workspace_and_a_later_run_goes_on_there(home: Path) -> None:
    agent = Agent(capabilities=[SkepWorkspace(home=home)], tools=[shell])
    command = {"command": "echo sown > bed; id -un; pwd"}
    first = await agent.run("sow", model=calls(("shell", command)))
    assert first.output == "agent\n/workspace\n"
    second = await agent.run("look", model=calls(("shell", {"command": "cat bed"})), workspace=first.workspace.ref)
    assert second.output == "sown\n"
    backend = first.workspace.backend
    assert isinstance(backend, SkepWorkspaceBackend)
    await backend.destroy()


async def test_a_named_workspace_is_made_once_and_kept(home: Path) -> None:
    one = SkepWorkspaceBackend(workspace="garden", home=home)
    await one.write_bytes("/workspace/bed", b"sown")
    await one.close()
    again = SkepWorkspaceBackend(workspace="garden", home=home)
    assert await again.read_bytes("/workspace/bed") == b"sown"
    assert one.ref == again.ref == WorkspaceRef(provider="skep", id="garden")
    await again.destroy()
    assert "garden" not in {manifest.id for manifest in Workspaces.at(home).list()}
    with pytest.raises(WorkspaceUnavailableError):
        await again.working_dir()


async def test_a_ref_leads_to_no_workspace_of_somebody_else(home: Path) -> None:
    await Workspaces.at(home).create("hive-of-somebody")
    for wanted in ("hive-of-somebody", "no-such-workspace", "../../etc", ""):
        thief = SkepWorkspaceBackend(WorkspaceRef(provider="skep", id=wanted), home=home)
        with pytest.raises(WorkspaceUnavailableError):
            await thief.working_dir()
    # The control: whoever has it by name in the program may use it.
    owner = SkepWorkspaceBackend(workspace="hive-of-somebody", home=home)
    assert await owner.working_dir() == "/workspace"
    await owner.close()


async def test_another_sandbox_is_started_where_one_was_lost(backend: SkepWorkspaceBackend) -> None:
    await backend.write_bytes("/workspace/note", b"kept")
    running = asyncio.create_task(backend.run(["sleep", "3600"]))
    async with asyncio.timeout(20):
        while "sleep" not in (await backend.run(["ps", "aux"])).stdout:
            await asyncio.sleep(0.01)
    await elsewhere(backend._with(lambda sandbox: sandbox.stop()))
    with pytest.raises(SandboxLost):
        await running
    assert await backend.read_bytes("/workspace/note") == b"kept"


async def test_a_command_that_prints_too_much_is_ended_and_its_beginning_shown(backend: SkepWorkspaceBackend) -> None:
    with pytest.raises(WorkspaceOutputLimitError) as ended:
        await backend.run("yes", shell=True)
    assert ended.value.stdout.startswith("y\ny\n") and len(ended.value.stdout) == 64 << 10


async def test_a_command_out_of_time_shows_what_it_had_printed(backend: SkepWorkspaceBackend) -> None:
    with pytest.raises(WorkspaceTimeoutError) as late:
        await backend.run("echo begun; sleep 3600", shell=True, timeout=0.5)
    assert late.value.stdout == "begun\n"


def test_a_backend_is_used_from_one_event_loop_after_the_other(home: Path) -> None:
    backend = SkepWorkspaceBackend(home=home)
    assert [asyncio.run(backend.run(["echo", word])).stdout for word in ("one", "two")] == ["one\n", "two\n"]
    asyncio.run(backend.destroy())


async def test_a_read_only_workspace_runs_nothing(home: Path) -> None:
    agent = Agent(capabilities=[SkepWorkspace("garden", home=home, read_only=True)], tools=[shell])
    with pytest.raises(WorkspaceReadOnlyError):
        await agent.run("sow", model=calls(("shell", {"command": "touch bed"})))


@pytest.mark.parametrize("provider", ["local", "docker"])
async def test_a_ref_of_another_provider_is_declined(home: Path, provider: str) -> None:
    ref = WorkspaceRef(provider=provider, id="x")
    with pytest.raises(ValueError, match=provider):
        SkepWorkspaceBackend(ref, home=home)
