"""What comes of an act. Texts are bounded; `spooled_to` names the file that has the whole."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from skep.agent.actions import Stamp
from skep.agent.bounds import printable
from skep.workspace.snapshot.indexes import Ecosystem

#: Why a tool itself failed, as opposed to what it ran.
TroubleKind = Literal[
    "tool_timeout",
    "sandbox_lost",
    "sandbox_disabled",
    "missing_package",
    "empty_result",
    "tool_refused",
    "tool_error",
    "invalid_arguments",
    "unknown_tool",
    "circuit_open",
]


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _whole_characters(cls, data: Any) -> Any:
        """Take in what a sandbox says: names and pages there can hold halves of characters."""
        return {name: _whole(value) for name, value in data.items()} if isinstance(data, dict) else data


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_whole(name): _whole(one) for name, one in value.items()}
    return tuple(map(_whole, value)) if isinstance(value, list | tuple) else value


class _Observation(_Told):
    stamp: Stamp


class _Output(_Observation):
    #: The beginning and the end of what was printed.
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    #: The file below /workspace with all of it, when something was left out here.
    spooled_to: str | None = None


class CommandEnded(_Output):
    """`timed_out`: it ran into the time that its caller had set."""

    kind: Literal["command_ended"] = "command_ended"
    exit_code: int
    timed_out: bool = False
    #: The limit of the sandbox that ended it, if one did, and what the shell has lost since the last command.
    limit: str | None = None
    note: str = ""


class CommandStarted(_Observation):
    kind: Literal["command_started"] = "command_started"
    job: str


class CommandPolled(_Output):
    """`missed` bytes were printed and dropped before this poll; `exit_code` is None while it runs."""

    kind: Literal["command_polled"] = "command_polled"
    job: str
    running: bool
    exit_code: int | None = None
    missed: int = 0


class CellRan(_Output):
    """`value` is that of the last expression, `shown` whatever else was displayed, `pictures` are files."""

    kind: Literal["cell_ran"] = "cell_ran"
    outcome: Literal["ok", "error", "interrupted", "timeout", "died"]
    value: str = ""
    shown: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()
    error: str = ""
    note: str = ""


class FileRead(_Observation):
    """`next` is the line to go on from, None at the end of the file; a `picture` has no text."""

    kind: Literal["file_read"] = "file_read"
    path: str
    text: str
    start: int
    next: int | None = None
    note: str = ""
    picture: str | None = None


class FileWritten(_Observation):
    kind: Literal["file_written"] = "file_written"
    path: str
    size: int


class FileEdited(_Observation):
    kind: Literal["file_edited"] = "file_edited"
    path: str
    replaced: int


class Entry(_Told):
    path: str
    kind: Literal["file", "folder", "link", "other"]
    size: int


class Listed(_Observation):
    kind: Literal["listed"] = "listed"
    path: str
    entries: tuple[Entry, ...]
    truncated: bool = False


class TestsRan(_Output):
    """The counts are None when the output says nothing about them."""

    __test__ = False

    kind: Literal["tests_ran"] = "tests_ran"
    exit_code: int
    passed: int | None = None
    failed: int | None = None
    errors: int | None = None
    skipped: int | None = None


class PackagesInstalled(_Observation):
    """`versions` are those of the packages that are new or changed, what they need included."""

    kind: Literal["packages_installed"] = "packages_installed"
    ecosystem: Ecosystem
    versions: dict[str, str]
    note: str = ""


class PortExposed(_Observation):
    kind: Literal["port_exposed"] = "port_exposed"
    port: int
    link: str


class SkillRan(_Output):
    """`status` is the last one that it reported about itself, as HTTP has them."""

    kind: Literal["skill_ran"] = "skill_ran"
    skill: str
    exit_code: int
    status: int | None = None


class PageSeen(_Observation):
    kind: Literal["page_seen"] = "page_seen"
    url: str
    title: str = ""
    status: int | None = None
    text: str = ""
    truncated: bool = False
    spooled_to: str | None = None
    picture: str | None = None


class Answered(_Observation):
    """What the person answered; with nobody there in time, `answered` is false and `answer` says so."""

    kind: Literal["answered"] = "answered"
    answer: str
    answered: bool = True


class Refused(_Observation):
    """The act was not allowed and did not run."""

    kind: Literal["refused"] = "refused"
    why: str


class Trouble(_Output):
    """The tool itself failed. What it had printed by then is there too."""

    kind: Literal["trouble"] = "trouble"
    failure: TroubleKind
    tool: str
    message: str
    exit_code: int | None = None
    #: The status that a skill reported, as HTTP has them.
    status: int | None = None
    #: What could be installed against it, and what could be used instead.
    packages: tuple[str, ...] = ()
    ecosystem: Ecosystem | None = None
    fallback: str | None = None


class Interrupted(_Observation):
    """The act was begun and not seen to its end; it may have taken effect."""

    kind: Literal["interrupted"] = "interrupted"
    note: str


Observation: TypeAlias = (
    CommandEnded
    | CommandStarted
    | CommandPolled
    | CellRan
    | FileRead
    | FileWritten
    | FileEdited
    | Listed
    | TestsRan
    | PackagesInstalled
    | PortExposed
    | SkillRan
    | PageSeen
    | Answered
    | Refused
    | Trouble
    | Interrupted
)


def pictures_of(observation: Observation) -> tuple[str, ...]:
    """Return the files of the pictures that came of an act."""
    match observation:
        case CellRan(pictures=paths):
            return paths
        case FileRead(picture=str(path)) | PageSeen(picture=str(path)):
            return (path,)
        case _:
            return ()


_ADAPTER: TypeAdapter[Observation] = TypeAdapter(Annotated[Observation, Field(discriminator="kind")])


def read_observation(data: Any) -> Observation:
    """Build an observation from what `model_dump(mode="json")` gave."""
    return _ADAPTER.validate_python(data)
