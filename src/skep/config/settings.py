"""The settings of config.json: frozen, typed, and without a single secret."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from skep.config.secrets import key_variable
from skep.errors import InvalidRequest
from skep.sandbox.mechanisms import DEFAULT_ENGINE, MECHANISMS, Isolation, at_least

#: The provider whose answers are read from a script.
REHEARSAL = "rehearsal"
SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


def _check_web_address(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("should be an http:// or https:// address")
    if parts.username or parts.password:
        raise ValueError("should not hold a user name or a password")
    return value


def _check_state_url(value: str) -> str:
    if value.startswith("sqlite:///"):
        if not value.removeprefix("sqlite:///").startswith("/"):
            raise ValueError("should give an absolute path, with four slashes: sqlite:////path/to/skep.db")
        return value
    scheme, _, rest = value.partition("://")
    if scheme in {"postgresql", "postgres"} and rest:
        return value
    raise ValueError("should be sqlite:////path/to/skep.db or postgresql://user@host/name")


def _check_host(entry: str) -> str:
    from skep.sandbox.egress.policy import parse_policy

    try:
        parse_policy([entry])
    except InvalidRequest as error:
        raise ValueError(f"{error.message}; {error.hint}") from error
    return entry


def _check_upstreams(pinned: dict[str, str]) -> dict[str, str]:
    from skep.sandbox.egress.policy import parse_policy

    try:
        parse_policy([], upstreams=pinned)
    except InvalidRequest as error:
        raise ValueError(f"{error.message}; {error.hint}") from error
    return pinned


def _check_archive_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.username or parts.password:
        raise ValueError("should not hold a key: keys come from SKEP_S3_ACCESS_KEY_ID and SKEP_S3_SECRET_ACCESS_KEY")
    if value.startswith("/") or (parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")):
        return value
    if parts.scheme == "s3" and parts.netloc:
        return value
    raise ValueError("should be an absolute path, file:///path, or s3://bucket/prefix (with ?endpoint=https://…)")


def _check_engine(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme == "unix" and not parts.netloc and parts.path:
        return value
    raise ValueError("should be the socket of an engine on this machine, unix:///path")


def _check_folder(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("should be an absolute path")
    return value


Provider = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
WebAddress = Annotated[str, AfterValidator(_check_web_address)]
ModelId = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$")]
HostName = Annotated[str, AfterValidator(_check_host)]
EngineAddress = Annotated[str, AfterValidator(_check_engine)]
Place = Annotated[str, AfterValidator(_check_folder)]
Word = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$")]
ServerName = Annotated[
    str, Field(max_length=253, pattern=r"^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:.]+\])$")
]
MechanismName = Literal["bubblewrap", "docker", "gvisor", "e2b", "daytona", "local"]


class Section(BaseModel):
    """Base of every part of the file: unknown fields are refused, values never change."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Model(Section):
    """A model reached over the network."""

    id: ModelId
    """Name of the model as its provider spells it; for rehearsal the path of its script."""
    provider: Provider
    """Who serves it, such as anthropic, openai or rehearsal. The key comes from the variable <PROVIDER>_API_KEY."""
    base_url: WebAddress | None = None
    """Address of the service, when it is not the provider's own."""

    @property
    def key_variable(self) -> str:
        """Name of the environment variable that carries the key."""
        return key_variable(self.provider)

    @property
    def is_local(self) -> bool:
        """Whether the model runs on this machine and so needs no key."""
        if self.provider == REHEARSAL:
            return True
        host = urlsplit(self.base_url or "").hostname or ""
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False


class ChatModel(Model):
    """A model that answers prompts."""

    intelligence_level: Literal["light", "normal", "super"] = "normal"
    """light classifies and extracts, normal plans and works, super is called in when normal fails."""
    supports_json: bool = True
    """Whether the model can be held to a JSON Schema."""
    vision: bool = False
    """Whether the model reads images."""


class EmbeddingModel(Model):
    """A model that turns text into vectors."""

    dimensions: int | None = Field(default=None, ge=8, le=16_384)
    """Length of its vectors, when the service lets one choose."""


class Limits(Section):
    """What one sandbox may use at most. 1 MB is 1,048,576 bytes."""

    cpus: float = Field(default=2.0, gt=0, le=1024)
    """Processor cores."""
    memory_mb: int = Field(default=4096, ge=64)
    """Memory of all its processes together."""
    disk_mb: int = Field(default=5120, ge=16)
    """Disk space of the workspace."""
    processes: int = Field(default=512, ge=8, le=1_000_000)
    """Processes and threads alive at once."""
    open_files: int = Field(default=1024, ge=64, le=1_048_576)
    """Open files per process."""
    output_kb: int = Field(default=1024, ge=1, le=1_048_576)
    """Output kept from one command, in units of 1,024 bytes; the rest is counted and dropped."""
    command_timeout_s: int = Field(default=30, ge=1)
    """Seconds a command may run when it does not ask for more."""
    command_timeout_cap_s: int = Field(default=300, ge=1, le=86_400, validate_default=True)
    """Seconds that a command or cell that is waited for gets at most; streams and background jobs have no such end."""

    @field_validator("command_timeout_cap_s")
    @classmethod
    def _cap_the_default(cls, cap: int, info: ValidationInfo) -> int:
        if cap < info.data.get("command_timeout_s", 0):
            raise ValueError("should not be less than command_timeout_s")
        return cap


class DockerSettings(Section):
    """How sandboxes are made by a Docker engine."""

    host: EngineAddress = DEFAULT_ENGINE
    """Socket of the engine, unix:///path. It has to be one of this machine: its containers show folders of it."""
    image: Word | None = None
    """Image that a sandbox starts from; by default one that Skep makes of this machine's programs."""
    rootfs: Place | None = None
    """Folder or tar file with a root file system that a sandbox starts from, instead of an image by name."""
    runtime: Word | None = None
    """Runtime of the engine, when it is not its own default."""

    @field_validator("rootfs")
    @classmethod
    def _start_from_one(cls, rootfs: str | None, info: ValidationInfo) -> str | None:
        if rootfs is not None and info.data.get("image") is not None:
            raise ValueError("should be left out where image is given")
        return rootfs


class GvisorSettings(Section):
    """How sandboxes are made by gVisor."""

    path: Place | None = None
    """The program runsc, when it is not found by its name."""
    rootfs: Place | None = None
    """Folder with a root file system that a sandbox starts from; by default this machine's programs are shown."""
    engine: bool = False
    """Whether the engine of sandbox.docker starts runsc, as one of its runtimes; by default Skep does."""
    runtime: Word | None = None
    """What that engine calls runsc, when it is not runsc."""


class E2bSettings(Section):
    """How sandboxes are made at E2B. The key comes from the variable E2B_API_KEY."""

    template: Word | None = None
    """Template that a sandbox starts from, when it is not the usual one of E2B."""
    api_url: WebAddress | None = None
    """Address of the service, when it is not E2B's own."""
    domain: Word | None = None
    """Domain of the sandboxes, when it is not E2B's own."""


class DaytonaSettings(Section):
    """How sandboxes are made at Daytona. The key comes from the variable DAYTONA_API_KEY."""

    api_url: WebAddress | None = None
    """Address of the service, when it is not Daytona's own."""
    target: Word | None = None
    """Region in which sandboxes are made."""
    snapshot: Word | None = None
    """Snapshot that a sandbox starts from, when it is not the usual one of Daytona."""


class SandboxSettings(Section):
    """How commands are kept apart from this machine."""

    isolation: Isolation = "namespaces"
    """The least isolation: none, namespaces, a kernel of its own, or another machine. A weaker mechanism is refused."""
    allow_unsafe: bool = False
    """Whether local, which isolates nothing, may be used."""
    mechanism: Literal[MechanismName, "disabled"] = Field(default="bubblewrap", validate_default=True)
    """What isolates a command; disabled lets nothing run at all."""
    fallback: tuple[MechanismName, ...] = Field(default=(), strict=False)
    """Mechanisms to use instead, in this order, where the one that is wanted cannot be used."""
    limits: Limits = Limits()
    """What one sandbox may use at most."""
    docker: DockerSettings = DockerSettings()
    """How sandboxes are made by a Docker engine."""
    gvisor: GvisorSettings = GvisorSettings()
    """How sandboxes are made by gVisor."""
    e2b: E2bSettings = E2bSettings()
    """How sandboxes are made at E2B."""
    daytona: DaytonaSettings = DaytonaSettings()
    """How sandboxes are made at Daytona."""

    @field_validator("mechanism")
    @classmethod
    def _isolate_enough(cls, name: str, info: ValidationInfo) -> str:
        if name != "disabled":
            _check_isolation(name, info)
        return name

    @field_validator("fallback")
    @classmethod
    def _fall_back_well(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        every = [info.data.get("mechanism"), *names]
        for name in names:
            _check_isolation(name, info)
            if every.count(name) > 1:
                raise ValueError(f"names {name} twice, or though it is the mechanism itself")
        return names


def _check_isolation(name: str, info: ValidationInfo) -> None:
    demanded, level = info.data.get("isolation", "none"), MECHANISMS[name].isolation
    if not at_least(level, demanded):
        raise ValueError(f"should not be {name}: its isolation is {level}, and sandbox.isolation is {demanded}")
    if name == "local" and not info.data.get("allow_unsafe", True):
        raise ValueError("should not be local, which isolates nothing, unless sandbox.allow_unsafe is true")


class WorkspaceSettings(Section):
    """The durable folder of a session."""

    template: str = Field(default="minimal", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Template that a new workspace starts from. minimal is built without a network in a moment; others are larger."""
    layering: Literal["auto", "overlay", "copy"] = "auto"
    """How a workspace lies over its snapshot: overlay shares it, copy copies it; auto tries overlay first."""
    archive_url: Annotated[str, AfterValidator(_check_archive_url)] | None = None
    """Where archives go: a folder, or s3://bucket/prefix?endpoint=…; by default archives in the state folder."""
    archive_after_days: int = Field(default=30, ge=1, le=3650)
    """Days without use after which a workspace is packed away; it comes back when it is needed."""


class PackageSettings(Section):
    """Where the packages of templates and workspaces come from."""

    python_index: WebAddress | None = None
    """Python package index to use instead of the public one (the address that ends in /simple)."""
    node_registry: WebAddress | None = None
    """Node package registry to use instead of the public one."""
    upstreams: Annotated[dict[str, str], AfterValidator(_check_upstreams)] = Field(default_factory=dict)
    """Addresses for hosts of indexes that are not looked up, such as a mirror here: {"host": "127.0.0.1:8080"}."""


class PolicySettings(Section):
    """What is allowed beyond the default of no network and no secrets."""

    allowed_hosts: tuple[HostName, ...] = Field(default=(), strict=False)
    """What sandboxes may reach: example.org, *.example.org, host:8443, or the sets pypi, npm, debian and github."""
    upstreams: Annotated[dict[str, str], AfterValidator(_check_upstreams)] = Field(default_factory=dict)
    """Addresses for allowed hosts that are not looked up, such as a service of your own: {"host": "10.1.2.3:8080"}."""
    may_reach_out: tuple[Literal["expose_port", "install_packages"], ...] = Field(default=(), strict=False)
    """Acts beyond the sandbox that need no approval: expose_port, install_packages."""
    approval_timeout_s: int = Field(default=3600, ge=1, le=2_592_000)
    """Seconds an act waits for a person's approval before it counts as denied."""


class Budgets(Section):
    """What may be spent before work stops. null sets no limit."""

    usd_per_task: float | None = Field(default=2.0, ge=0)
    """US dollars for the model calls of one task."""
    usd_per_day: float | None = Field(default=20.0, ge=0)
    """US dollars for the tasks that one account asks for in one day (UTC); then no more prompts are taken."""
    steps_per_task: int = Field(default=50, ge=1, le=10_000)
    """Acts that one task may take."""
    requests_per_task: int = Field(default=100, ge=1, le=10_000)
    """Model calls that one task may make."""
    tokens_per_task: int = Field(default=2_000_000, ge=1000)
    """Tokens, in and out, that the model calls of one task may use."""
    seconds_per_task: int = Field(default=3600, ge=1, le=604_800)
    """Seconds that one task may take, without the time it waits for a person."""


class TaskSettings(Section):
    """How prompts are carried to replies."""

    concurrent: int = Field(default=50, ge=1, le=1000)
    """Tasks that one process works on at once."""
    concurrent_per_account: int = Field(default=8, ge=1, le=1000)
    """Prompts of one account that are worked on at once, by all processes together; and as many parts of plans."""
    starts_per_minute: int | None = Field(default=None, ge=1, le=100_000)
    """Prompts of one account that are begun in a minute at most. null sets no limit."""
    model_timeout_s: int = Field(default=120, ge=1, le=3600)
    """Seconds that a model may take to answer."""
    confidence: float = Field(default=0.5, ge=0, le=1)
    """A worker that is less sure than this of its answer is followed by one with a stronger model."""


class GatewaySettings(Section):
    """Where skep serve listens."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=253, pattern=r"^\S+$")
    """Address to listen at. Any other than a loopback one lets the network in: put a proxy with TLS before it."""
    port: int = Field(default=7411, ge=0, le=65_535)
    """Port to listen at; 0 takes a free one."""
    names: tuple[ServerName, ...] = Field(default=(), strict=False)
    """Names that the server answers to beside those of this machine, such as the one of the proxy before it."""


class Settings(Section):
    """Everything that config.json may say; each field has a default, so an empty object is valid."""

    model_config = ConfigDict(title="Skep config.json")

    schema_url: str | None = Field(default=None, alias="$schema")
    """Address of this schema, for editors."""
    state_url: Annotated[str, AfterValidator(_check_state_url)] | None = None
    """Database; by default skep.db in the state folder. PostgreSQL's password may come from PGPASSWORD."""
    chat_models: tuple[ChatModel, ...] = Field(default=(), strict=False)
    """Models that answer prompts, the preferred one first."""
    embedding_models: tuple[EmbeddingModel, ...] = Field(default=(), strict=False)
    """Models that turn text into vectors, the preferred one first."""
    sandbox: SandboxSettings = SandboxSettings()
    """How commands are kept apart from this machine."""
    workspace: WorkspaceSettings = WorkspaceSettings()
    """The durable folder of a session."""
    packages: PackageSettings = PackageSettings()
    """Where the packages of templates and workspaces come from."""
    policy: PolicySettings = PolicySettings()
    """What is allowed beyond the default of no network and no secrets."""
    budgets: Budgets = Budgets()
    """What may be spent before work stops."""
    tasks: TaskSettings = TaskSettings()
    """How prompts are carried to replies."""
    gateway: GatewaySettings = GatewaySettings()
    """Where skep serve listens."""

    @field_validator("chat_models", "embedding_models")
    @classmethod
    def _name_each_once(cls, models: tuple[Model, ...]) -> tuple[Model, ...]:
        seen = set()
        for model in models:
            if (model.provider, model.id, model.base_url) in seen:
                raise ValueError(f"holds {model.id} of {model.provider} twice")
            seen.add((model.provider, model.id, model.base_url))
        return models

    @property
    def models(self) -> tuple[Model, ...]:
        return (*self.chat_models, *self.embedding_models)


def json_schema() -> dict[str, object]:
    """Return the JSON Schema of config.json, for editors."""
    return {"$schema": SCHEMA_ID, **Settings.model_json_schema(by_alias=True)}
