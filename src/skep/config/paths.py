"""Where Skep keeps its files, by the XDG base directory rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Paths:
    """The one file Skep reads and the two folders it writes."""

    config: Path
    home: Path
    logs: Path
    config_named: bool = False
    """Whether SKEP_CONFIG names the file: a named file must exist, the usual one need not."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Paths:
        """Find the paths for this environment; nothing is created."""
        config = environ.get("SKEP_CONFIG", "")
        home = environ.get("SKEP_HOME", "")
        return cls(
            config=_absolute(config) if config else _base(environ, "CONFIG", ".config") / "config.json",
            home=_absolute(home) if home else _base(environ, "DATA", ".local/share"),
            logs=_base(environ, "STATE", ".local/state") / "log",
            config_named=bool(config),
        )

    @property
    def log_file(self) -> Path:
        return self.logs / "skep.log"

    @property
    def default_state_url(self) -> str:
        return f"sqlite:///{self.home / 'skep.db'}"


def _base(environ: Mapping[str, str], kind: str, usual: str) -> Path:
    # platformdirs answers only for the process's own environment; demo, doctor and tests need other ones.
    # The XDG rules say that a relative value is to be ignored.
    named = Path(environ.get(f"XDG_{kind}_HOME", ""))
    if named.is_absolute():
        return named / "skep"
    home = environ.get("HOME", "")
    return (Path(home) if home else Path.home()) / usual / "skep"


def _absolute(name: str) -> Path:
    return Path(name).expanduser().absolute()
