"""What a worker can want to do. The fields of an action are the arguments of the tool of its kind."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from skep.errors import InvalidRequest
from skep.workspace.snapshot.indexes import Ecosystem
from skep.workspace.template.requirement import node_package, python_requirement

Text = Annotated[str, Field(max_length=200_000)]
Line = Annotated[str, Field(min_length=1, max_length=4_000)]
Seconds = Annotated[float, Field(gt=0, le=3_600, allow_inf_nan=False)]


class Stamp(BaseModel):
    """Which call it belongs to, when it was, and who acted. `call` is Skep's own name, never a model's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    step: int
    call: str
    at: datetime
    actor: str

    @property
    def key(self) -> str:
        """What makes a second run of the same call recognisable."""
        return f"{self.run}:{self.call}"


class _Action(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    stamp: Stamp


class RunCommand(_Action):
    """Run a command in a shell whose folder and variables last from one command to the next.

    With `background` it is started and left running in a shell of its own: poll it by the job that is returned.
    """

    kind: Literal["run_command"] = "run_command"
    command: Annotated[str, Field(min_length=1, max_length=100_000)]
    timeout_s: Seconds | None = None
    background: bool = False


class PollCommand(_Action):
    """Wait up to `wait_s` seconds for a background command to end, and return what it printed since the last poll."""

    kind: Literal["poll_command"] = "poll_command"
    job: Line
    wait_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 0


class StopCommand(_Action):
    """End a background command and what it has started."""

    kind: Literal["stop_command"] = "stop_command"
    job: Line


class RunPython(_Action):
    """Run Python where the last code left off; the value of the last expression, tables and pictures are returned."""

    kind: Literal["run_python"] = "run_python"
    code: Annotated[Text, Field(min_length=1)]
    timeout_s: Seconds | None = None


class ReadFile(_Action):
    """Read lines of a file below /workspace, from `start` (the first is 1); or look at a picture."""

    kind: Literal["read_file"] = "read_file"
    path: Line
    start: Annotated[int, Field(ge=1, le=1_000_000_000)] = 1
    lines: Annotated[int, Field(ge=1, le=2_000)] = 500


class WriteFile(_Action):
    """Write a file below /workspace, in place of what is there or, with `append`, after it."""

    kind: Literal["write_file"] = "write_file"
    path: Line
    content: Text
    append: bool = False


class EditFile(_Action):
    """Replace text in a file. `old` has to match exactly and to occur once, unless `all` is true."""

    kind: Literal["edit_file"] = "edit_file"
    path: Line
    old: Annotated[Text, Field(min_length=1)]
    new: Text
    all: bool = False


class ListFiles(_Action):
    """List a folder below /workspace."""

    kind: Literal["list_files"] = "list_files"
    path: Line = "."
    depth: Annotated[int, Field(ge=1, le=5)] = 1


class RunTests(_Action):
    """Run tests and count how they ended; `paths` are files or folders, `command` replaces pytest."""

    kind: Literal["run_tests"] = "run_tests"
    paths: Annotated[tuple[Line, ...], Field(max_length=50)] = ()
    command: Text = ""
    timeout_s: Seconds | None = None


class InstallPackages(_Action):
    """Install packages into the workspace for good, as requests or requests>=2.31, or for node as axios@^1.7."""

    kind: Literal["install_packages"] = "install_packages"
    ecosystem: Ecosystem
    names: Annotated[tuple[Line, ...], Field(min_length=1, max_length=20)]

    @model_validator(mode="after")
    def _name_packages_alone(self) -> Self:
        read = python_requirement if self.ecosystem == "python" else node_package
        try:
            for name in self.names:
                read(name)
        except InvalidRequest as error:
            raise ValueError(f"{error.message}; {error.hint}") from error
        return self


class ExposePort(_Action):
    """Make a server that listens in the sandbox reachable for the person, by a link."""

    kind: Literal["expose_port"] = "expose_port"
    port: Annotated[int, Field(ge=1, le=65_535)]


class UseSkill(_Action):
    """Run a script of a skill. `skill` is its shelf and name, such as hive/post; see /workspace/hive/skills."""

    kind: Literal["use_skill"] = "use_skill"
    skill: Annotated[str, Field(max_length=160)]
    script: Annotated[str, Field(max_length=100)]
    arguments: Annotated[tuple[Text, ...], Field(max_length=100)] = ()
    environment: Annotated[dict[str, Text], Field(max_length=50)] = Field(default_factory=dict)


class Browse(_Action):
    """Use the browser: navigate to a `url`, wait for or click a `selector`, extract_text, or take a screenshot."""

    kind: Literal["browse"] = "browse"
    act: Literal["navigate", "wait", "click", "type", "extract_text", "screenshot"]
    url: Annotated[str, Field(max_length=4_000)] = ""
    selector: Annotated[str, Field(max_length=1_000)] = ""
    text: Text = ""
    timeout_s: Seconds | None = None


class AskUser(_Action):
    """Ask the person, and wait for the answer. Use it only when you cannot find out by yourself."""

    kind: Literal["ask_user"] = "ask_user"
    question: Annotated[str, Field(min_length=1, max_length=4_000)]
    choices: Annotated[tuple[Annotated[str, Field(max_length=200)], ...], Field(max_length=10)] = ()


class Finish(_Action):
    """End the task with a reply for the person, and how sure you are of it, from 0 to 1."""

    kind: Literal["finish"] = "finish"
    reply: Annotated[Text, Field(pattern=r"\S")]
    confidence: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    outcome: Literal["done", "failed"] = "done"


Action: TypeAlias = (
    RunCommand
    | PollCommand
    | StopCommand
    | RunPython
    | ReadFile
    | WriteFile
    | EditFile
    | ListFiles
    | RunTests
    | InstallPackages
    | ExposePort
    | UseSkill
    | Browse
    | AskUser
    | Finish
)

ACTIONS: dict[str, type[Action]] = {kind.model_fields["kind"].default: kind for kind in get_args(Action)}

_ADAPTER: TypeAdapter[Action] = TypeAdapter(Annotated[Action, Field(discriminator="kind")])


def read_action(data: Any) -> Action:
    """Build an action from what `model_dump(mode="json")` gave."""
    return _ADAPTER.validate_python(data)
