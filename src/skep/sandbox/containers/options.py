"""What only this mechanism understands, as `Sandbox.create(options=…)` gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from skep.errors import InvalidRequest


class Options(BaseModel):
    """Which engine, and what the container is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: The engine's address; by default the usual one of this machine.
    host: str | None = None
    #: An image by name, pulled if it is missing.
    image: str | None = None
    #: A root file system by path, a folder or a tar file, imported once.
    rootfs: str | None = None
    #: The engine's runtime, such as `runsc`; by default the engine's own.
    runtime: str | None = None

    @model_validator(mode="after")
    def _one_root(self) -> Self:
        if self.image is not None and self.rootfs is not None:
            raise ValueError("give an image or a rootfs, not both")
        return self

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Take the options of a recipe, or say what is wrong with them."""
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'they'}: {one['msg']}" for one in error.errors())
            raise InvalidRequest(
                f"the options for docker are wrong: {wrong}", hint=f"those there are: {', '.join(cls.model_fields)}"
            ) from error

    @property
    def is_bare(self) -> bool:
        """Whether the container shows the host's own programs."""
        return self.image is None and self.rootfs is None
