"""inspect_ai runs its samples in Skep's sandboxes, and its own checks pass there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import Model, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash, python, text_editor
from inspect_ai.util import OutputLimitExceededError, SandboxUnavailableError, SandboxUserUnsupportedError
from inspect_ai.util._sandbox.limits import override_sandbox_output_limit
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - the checks, which pytest collects here
from pydantic import ValidationError

from skep import Limits, Workspaces
from skep.integrations.inspect_ai import SkepSandboxConfig, SkepSandboxEnvironment


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared() -> AsyncIterator[SkepSandboxEnvironment]:
    made = await SkepSandboxEnvironment.open(SkepSandboxConfig())
    yield made
    await made.close()


@pytest.fixture
def sandbox_env(shared: SkepSandboxEnvironment) -> SkepSandboxEnvironment:
    return shared


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


def said(*outputs: ModelOutput) -> Model:
    """Give a model that says these things, and counts no tokens: that would take a download."""
    for output in outputs:
        output.usage = ModelUsage()
    return get_model("mockllm/model", custom_outputs=list(outputs))


def use(tool: str, **arguments: Any) -> ModelOutput:
    return ModelOutput.for_tool_call("mockllm/model", tool, arguments)


def observed(task: Task, model: Model, logs: Path) -> list[str]:
    """Run a task of one sample, and return what its tools answered."""
    [log] = evaluate(task, model=model, display="none", log_dir=str(logs))
    assert log.status == "success" and log.samples is not None, log.error
    return [message.text or repr(message.error) for message in log.samples[0].messages if message.role == "tool"]


@pytest.mark.timeout(300)  # inspect_ai installs its tools inside, which takes a while on a busy machine
# It leaves streams of its own to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored.*MemoryObject:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning")
def test_a_task_names_skep_alone_and_its_tools_work_in_a_sandbox_of_each_sample(logs: Path) -> None:
    model = said(
        use("bash", command="id -un; pwd; cat note; ls -A / | grep -c root; touch /etc/x && echo changed"),
        use("python", code="print(6 * 7)"),
        use("text_editor", command="create", path="/workspace/poem", file_text="bees\n"),
        use("bash", command="cat poem"),
        ModelOutput.from_content("mockllm/model", "done"),
    )
    sample = Sample(input="go", target="done", files={"note": "from the dataset\n"})
    tools = [bash(timeout=60), python(timeout=60), text_editor(timeout=100)]
    task = Task(dataset=[sample], solver=[use_tools(tools), generate()], scorer=includes(), sandbox="skep")
    ran, computed, created, read = observed(task, model, logs)
    assert ran == "agent\n/workspace\nfrom the dataset\n0\nchanged\n"
    assert (computed, read) == ("42\n", "bees\n")
    assert "success" in created


async def test_samples_do_not_see_each_other() -> None:
    one, two = [await SkepSandboxEnvironment.open(SkepSandboxConfig()) for _ in range(2)]
    try:
        await one.write_file("secret", "mine")
        assert (await one.exec(["useradd", "-m", "bee"], user="root")).success
        with pytest.raises(FileNotFoundError):
            await two.read_file("secret")
        assert not (await two.exec(["id", "bee"])).success
        assert "bee" not in Path("/etc/passwd").read_text()
    finally:
        await one.close()
        await two.close()


async def test_users_are_names_over_one_user(shared: SkepSandboxEnvironment) -> None:
    assert (await shared.exec(["adduser", "--uid", "1234", "--comment", "a bee", "maya"], user="root")).success
    seen = await shared.exec(["sh", "-c", "id -u; id -un; id -gn; echo $HOME; touch ~/hers"], user="maya")
    assert seen.stdout == "1234\nmaya\nmaya\n/home/maya\n"
    by_number = await shared.exec(["whoami"], user="1234")
    assert by_number.stdout == "maya\n"
    # Not a boundary: to the kernel they are all the agent.
    assert (await shared.exec(["stat", "-c", "%U", "/home/maya/hers"])).stdout == "agent\n"
    assert (await shared.exec(["userdel", "maya"], user="root")).success
    gone = await shared.exec(["whoami"], user="maya")
    assert (gone.success, "maya" in gone.stderr) == (False, True)


async def test_a_sandbox_whose_etc_cannot_be_written_has_no_other_users(tmp_path: Path) -> None:
    made = await SkepSandboxEnvironment.open(SkepSandboxConfig(options={"users": False}))
    try:
        assert (await made.exec(["whoami"], user="root")).stdout == "root\n"
        with pytest.raises(SandboxUserUnsupportedError, match="maya"):
            await made.exec(["whoami"], user="maya")
        assert not (await made.exec(["touch", "/etc/x"], user="root")).success
    finally:
        await made.close()


async def test_a_command_that_prints_too_much_is_ended_and_says_so(shared: SkepSandboxEnvironment) -> None:
    with (
        override_sandbox_output_limit(1 << 20, "exec"),
        pytest.raises(OutputLimitExceededError, match="1 MiB") as ended,
    ):
        await shared.exec(["yes"])
    assert ended.value.truncated_output is not None and len(ended.value.truncated_output) == 1 << 20
    with override_sandbox_output_limit(20 << 20, "exec"):
        assert len((await shared.exec(["head", "-c", "15000000", "/dev/zero"])).stdout) == 15_000_000


async def test_a_command_out_of_time_says_what_it_had_printed(shared: SkepSandboxEnvironment) -> None:
    with pytest.raises(TimeoutError) as late:
        await shared.exec(["sh", "-c", "echo begun; sleep 60"], timeout=1)
    assert getattr(late.value, "truncated_output", None) == "begun\n"


async def test_a_cancelled_command_is_ended(shared: SkepSandboxEnvironment) -> None:
    running = asyncio.create_task(shared.exec(["sh", "-c", "echo $$ > pid; exec sleep 4321"]))
    async with asyncio.timeout(20):
        while not (await shared.exec(["test", "-s", "pid"])).success:
            await asyncio.sleep(0.01)
        running.cancel()
        while (await shared.exec(["sh", "-c", "kill -0 $(cat pid)"])).success:
            await asyncio.sleep(0.01)
    assert running.cancelled()


async def test_a_missing_program_or_folder_is_a_failed_result(shared: SkepSandboxEnvironment) -> None:
    missing = await shared.exec(["no-such-program"])
    assert (missing.success, missing.returncode) == (False, 127) and "no-such-program" in missing.stderr
    assert not (await shared.exec(["true"], cwd="no/such/folder")).success


async def test_files_keep_their_line_ends_and_links_their_targets(shared: SkepSandboxEnvironment) -> None:
    await shared.exec(["ln", "-s", "/tmp/elsewhere", "way"])
    await shared.write_file("way", "one\r\ntwo\n")
    assert await shared.read_file("/tmp/elsewhere") == "one\r\ntwo\n"
    await shared.write_file("bytes", b"\xff")
    with pytest.raises(UnicodeDecodeError):
        await shared.read_file("bytes")
    with pytest.raises(PermissionError):
        await shared.write_file("/usr/bin/x", "")
    with pytest.raises(NotADirectoryError):
        await shared.write_file("bytes/below", "")


async def test_a_sandbox_that_is_gone_is_unavailable() -> None:
    made = await SkepSandboxEnvironment.open(SkepSandboxConfig())
    await made.close()
    with pytest.raises(SandboxUnavailableError):
        await made.exec(["true"])
    with pytest.raises(SandboxUnavailableError):
        await made.read_file("note")


CONFIG = """
folder: data
env: {SEASON: spring}
limits: {memory_bytes: 536870912, processes: 64}
"""


async def test_a_yaml_file_configures_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "run.sh").write_text("echo $SEASON")
    (tmp_path / "data" / "deep" / "run.sh").chmod(0o755)
    (tmp_path / "skep.yaml").write_text(CONFIG)
    config = str(tmp_path / "skep.yaml")
    await SkepSandboxEnvironment.task_init("task", config)
    made = await SkepSandboxEnvironment.sample_init("task", config, {})
    try:
        assert (await made["default"].exec(["sh", "deep/run.sh"])).stdout == "spring\n"
        await made["default"].write_file("deep/run.sh", "changed")
    finally:
        await SkepSandboxEnvironment.sample_cleanup("task", config, made, False)
    assert (tmp_path / "data" / "deep" / "run.sh").read_text() == "echo $SEASON"


@pytest.mark.parametrize("wrong", [{"networks": []}, {"limits": {"memory": 1}}, {"limits": {"cpus": "many"}}])
def test_a_mistake_in_the_configuration_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"networks|no such limit: memory|cpus"):
        SkepSandboxEnvironment.config_deserialize(wrong)


def test_a_configuration_is_the_same_after_it_was_stored_in_a_log() -> None:
    config = SkepSandboxConfig(network=("example.org",), env={"A": "b"}, limits=Limits(cpus=1))
    stored = SkepSandboxEnvironment.config_deserialize(config.model_dump(mode="json"))
    assert stored == config and hash(stored) == hash(config)


async def test_a_template_is_what_every_sample_starts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKEP_HOME", str(tmp_path))
    config = SkepSandboxConfig(template="minimal")
    await SkepSandboxEnvironment.task_init("task", config)
    made = await SkepSandboxEnvironment.sample_init("task", config, {})
    try:
        assert (await made["default"].exec(["sh", "-c", "ls -A; which python"])).stdout.split() == [
            ".venv", "attachments", "hive", "output", "pyproject.toml", "/workspace/.venv/bin/python",
        ]  # fmt: skip
        await SkepSandboxEnvironment.cli_cleanup(None)  # which leaves alone what is in use
        assert (await made["default"].exec(["true"])).success
    finally:
        await SkepSandboxEnvironment.sample_cleanup("task", config, made, False)
    assert Workspaces.at(tmp_path).list() == []


async def test_what_a_killed_evaluation_left_is_cleaned_up_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKEP_HOME", str(tmp_path))
    workspaces = Workspaces.at(tmp_path)
    await workspaces.create("sample-left", labels={"made-for": "inspect_ai"})
    await workspaces.create("garden")
    await SkepSandboxEnvironment.cli_cleanup(None)
    assert [manifest.id for manifest in workspaces.list()] == ["garden"]
