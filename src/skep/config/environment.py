"""The one place that reads the process's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from skep.config.paths import Paths
from skep.config.secrets import CloudKeys, StoreKeys, known_secrets


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says: where files are, and the secrets by the names of their variables."""

    paths: Paths
    variables: Mapping[str, str]

    @classmethod
    def read(cls) -> Environment:
        variables = dict(os.environ)
        return cls(Paths.of(variables), variables)

    def __repr__(self) -> str:
        return f"Environment(paths={self.paths!r})"

    def key(self, variable: str) -> str | None:
        """Return the secret in a variable; blank counts as absent."""
        return self.variables.get(variable, "").strip() or None

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that must never be written anywhere, the longest first."""
        return known_secrets(self.variables)

    @property
    def store_keys(self) -> StoreKeys:
        """What opens the store of archives, when it is one over the network."""
        return StoreKeys.of(self.variables)

    @property
    def cloud_keys(self) -> CloudKeys:
        """What opens the services that hold sandboxes elsewhere."""
        return CloudKeys.of(self.variables)
