"""The part of the Open Container Initiative's runtime configuration that Skep hands to runsc."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)


class Shown(_Part):
    """One mount inside."""

    destination: str
    type: str
    source: str
    options: tuple[str, ...] = ()

    @classmethod
    def folder(cls, source: str, inside: str, *, read_only: bool) -> Shown:
        options = ("rbind", "ro" if read_only else "rw")
        return cls(destination=inside, type="bind", source=source, options=options)

    @classmethod
    def memory(cls, inside: str, *options: str) -> Shown:
        return cls(destination=inside, type="tmpfs", source="tmpfs", options=options)


class User(_Part):
    """Root of a user namespace with one user of the host in it; `entry` gives it another number."""

    uid: int = 0
    gid: int = 0


class Capabilities(_Part):
    """None."""

    bounding: tuple[str, ...] = ()
    effective: tuple[str, ...] = ()
    inheritable: tuple[str, ...] = ()
    permitted: tuple[str, ...] = ()
    ambient: tuple[str, ...] = ()


class First(_Part):
    """The first process inside."""

    args: tuple[str, ...]
    env: tuple[str, ...] = ("PATH=/usr/bin:/bin",)
    cwd: str = "/"
    user: User = User()
    capabilities: Capabilities = Capabilities()
    no_new_privileges: bool = True
    terminal: bool = False


class Root(_Part):
    """The root file system, in the bundle's folder. It is read-only before runsc sees it."""

    path: str = "root"
    readonly: bool = False


class Namespace(_Part):
    """A namespace of the sandbox's own."""

    type: str


class Linux(_Part):
    """What only Linux has."""

    namespaces: tuple[Namespace, ...] = tuple(
        Namespace(type=name) for name in ("pid", "ipc", "uts", "mount", "network")
    )


class Config(_Part):
    """The whole of config.json."""

    process: First
    mounts: tuple[Shown, ...]
    oci_version: str = "1.0.2"
    root: Root = Root()
    hostname: str = "skep"
    linux: Linux = Linux()

    def text(self) -> bytes:
        return self.model_dump_json(by_alias=True).encode()
