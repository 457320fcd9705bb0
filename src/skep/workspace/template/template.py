"""What a workspace starts from, as its template says it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

import rfc8785
from packaging.utils import canonicalize_name
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from skep.errors import InvalidRequest
from skep.sandbox.egress.policy import parse_policy
from skep.state.names import check_name
from skep.workspace.template.place import workspace_place
from skep.workspace.template.requirement import node_package, python_name, python_requirement, python_versions
from skep.workspace.template.semver import Range


def _checked(check: Callable[[str], object]) -> AfterValidator:
    """Make a validator of a function that raises InvalidRequest; its hint goes with the problem."""

    def validate(value: str) -> str:
        try:
            check(value)
        except InvalidRequest as error:
            told = {"message": error.message, "hint": error.hint}
            raise PydanticCustomError("refused", "{message}", told) from error
        return value

    return AfterValidator(validate)


def _whole(value: object) -> object:
    """Keep True and 1.0 from passing for 1, as they do where values are only compared."""
    if type(value) is not int:
        raise PydanticCustomError("literal_error", "should be 1")
    return value


def host_rules(entry: str) -> tuple[object, ...]:
    """Return what an entry of the allowed domains lets through, whatever its spelling."""
    return parse_policy([entry]).rules


Name = Annotated[str, _checked(lambda value: check_name("this", value))]
PythonRequirement = Annotated[str, _checked(python_requirement)]
PythonVersions = Annotated[str, _checked(python_versions)]
NodeRequirement = Annotated[str, _checked(node_package)]
NodeVersions = Annotated[str, _checked(Range.parse)]
Domain = Annotated[str, _checked(host_rules)]
Place = Annotated[str, _checked(workspace_place)]


class Part(BaseModel):
    """Base of every part of a template: unknown fields are refused, values never change."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Python(Part):
    """An environment of Python in .venv."""

    version: PythonVersions | None = None
    """3.12, 3.12.4 or specifiers such as >=3.11,<3.14; whatever is here if it is not said."""
    dependencies: tuple[PythonRequirement, ...] = Field(default=(), strict=False, max_length=500)
    """Packages of the package index, as PEP 508 writes them."""


class NodeJS(Part):
    """Packages of npm's registry in node_modules, and what runs them."""

    version: NodeVersions | None = None
    """A range of versions of the runtime, such as 20 or >=18."""
    runtime: Literal["node", "bun"] = "node"
    """The program that runs JavaScript and installs its packages."""
    dependencies: tuple[NodeRequirement, ...] = Field(default=(), strict=False, max_length=500)
    """Packages with their ranges, such as axios@^1.7."""


class System(Part):
    """The programs that a person or an agent meets first."""

    shell: Literal["bash", "sh"] = "bash"
    """What runs commands."""
    editor: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._+-]{0,62}$")] | None = None
    """What EDITOR names inside."""


class Security(Part):
    """What programs inside may reach and change."""

    network: Literal["none", "packages", "allowed"] = "none"
    """none, the package indexes alone, or the allowed domains alone."""
    allowed_domains: tuple[Domain, ...] = Field(default=(), strict=False, max_length=200)
    """example.org, *.example.org, host:8443, or the sets pypi, npm, debian and github."""
    read_only_paths: tuple[Place, ...] = Field(default=(), strict=False, max_length=50)
    """Places below /workspace that may be read and not changed."""
    writable_paths: tuple[Place, ...] = Field(default=(), strict=False, max_length=50)
    """Places below a read-only one that may be changed all the same."""


class Resources(Part):
    """What a sandbox over the workspace may use; the settings decide what is not said. 1 MB is 1,048,576 bytes."""

    cpus: float | None = Field(default=None, gt=0, le=1024)
    """Processor cores."""
    memory_mb: int | None = Field(default=None, ge=64, le=1 << 24)
    """Memory of all its processes together."""
    disk_mb: int | None = Field(default=None, ge=16, le=1 << 30)
    """Disk space of what the workspace adds to its snapshot."""
    processes: int | None = Field(default=None, ge=8, le=1_000_000)
    """Processes and threads alive at once."""


class Template(Part):
    """A recipe for workspaces."""

    version: Annotated[Literal[1], BeforeValidator(_whole)]
    """Version of the format."""
    name: Name
    """Name of the template, which is that of its file."""
    description: Annotated[str, Field(max_length=1000)] = ""
    """What it is for, in a line or two."""
    extends: Name | None = None
    """Another template, to which this one adds."""
    python: Python | None = None
    """An environment of Python; none if it is not said."""
    nodejs: NodeJS | None = None
    """Packages for JavaScript; none if it is not said."""
    system: System = System()
    """The programs that a person or an agent meets first."""
    security: Security = Security()
    """What programs inside may reach and change."""
    resources: Resources = Resources()
    """What a sandbox over the workspace may use."""

    def recipe_hash(self) -> str:
        """Hash what decides the content of a snapshot; neither order nor spelling of the packages matters."""
        return hashlib.sha256(rfc8785.dumps(self._recipe())).hexdigest()

    def _recipe(self) -> dict[str, Any]:
        recipe: dict[str, Any] = {"python": None, "nodejs": None}
        if self.python:
            packages = sorted({_normal(one) for one in self.python.dependencies})
            recipe["python"] = {"version": self.python.version, "dependencies": packages}
        if self.nodejs:
            recipe["nodejs"] = {**self.nodejs.model_dump(), "dependencies": sorted(set(self.nodejs.dependencies))}
        return recipe


def extend(base: Template, child: Template) -> Template:
    """Add a template to the one that it extends.

    A value of the child replaces the base's; lists are joined. For a package that both name, the child's requirement
    is taken. A path is read-only or writable as the child says. A network without domains drops the base's domains.
    """
    return child.model_copy(
        update={
            "extends": None,
            "python": _joined_python(base.python, child.python),
            "nodejs": _joined_nodejs(base.nodejs, child.nodejs),
            "system": _replaced(base.system, child.system),
            "security": _joined_security(base.security, child.security),
            "resources": _replaced(base.resources, child.resources),
        }
    )


def _joined_python(base: Python | None, child: Python | None) -> Python | None:
    if base is None or child is None:
        return child or base
    return _replaced(base, child, dependencies=joined(base.dependencies, child.dependencies, python_name))


def _joined_nodejs(base: NodeJS | None, child: NodeJS | None) -> NodeJS | None:
    if base is None or child is None:
        return child or base
    packages = joined(base.dependencies, child.dependencies, lambda text: node_package(text).name)
    return _replaced(base, child, dependencies=packages)


def _joined_security(base: Security, child: Security) -> Security:
    closed = "network" in child.model_fields_set and child.network != "allowed"
    inherited = () if closed else base.allowed_domains
    read_only = [path for path in base.read_only_paths if path not in child.writable_paths]
    writable = [path for path in base.writable_paths if path not in child.read_only_paths]
    return _replaced(
        base,
        child,
        allowed_domains=joined(inherited, child.allowed_domains, host_rules),
        read_only_paths=joined(read_only, child.read_only_paths, str),
        writable_paths=joined(writable, child.writable_paths, str),
    )


P = TypeVar("P", bound=Part)


def _replaced(base: P, child: P, **lists: tuple[str, ...]) -> P:
    """Lay what the child says over the base; lists that have been joined count as said."""
    said = {name: getattr(child, name) for name in child.model_fields_set}
    return base.model_copy(update=said | lists)


def joined(base: Iterable[str], added: Iterable[str], key: Callable[[str], object]) -> tuple[str, ...]:
    """Join two lists; entries of the second replace those of the first with the same key, in their place."""
    ours: dict[object, list[str]] = {}
    for entry in added:
        ours.setdefault(key(entry), []).append(entry)
    replaced, found = set(ours), []
    for entry in base:
        found += ours.pop(key(entry), []) if key(entry) in replaced else [entry]
    return (*dict.fromkeys(found), *(entry for entries in ours.values() for entry in entries))


def _normal(text: str) -> str:
    requirement = python_requirement(text)
    requirement.name = canonicalize_name(requirement.name)
    return str(requirement)
