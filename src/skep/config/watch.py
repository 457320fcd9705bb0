"""Notice a changed config.json while running: apply what is valid, keep out what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from skep.config.file import parse, read
from skep.config.paths import Paths
from skep.config.settings import Settings
from skep.errors import ConfigInvalid

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Change:
    """New settings in effect, and the sections that differ from the old ones."""

    settings: Settings
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


class ConfigWatch:
    """Keeps the settings in effect for as long as `run` runs.

    `applied` is called after each valid change, `refused` once for each content that is not valid; the old
    settings then stay in effect. A file that vanishes counts as not valid.
    """

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        *,
        applied: Callable[[Change], None],
        refused: Callable[[ConfigInvalid], None],
    ) -> None:
        self.settings = settings
        self._paths = paths
        self._applied = applied
        self._refused = refused
        self._seen = self._look()
        self._doubtful: bytes | str | None = None

    async def run(self, *, poll_s: float = POLL_S) -> None:
        """Look at the file until cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            self.poll()

    def poll(self) -> None:
        """Look once.

        Invalid content is believed only when two looks in a row find the same: editors that write in place
        leave the file cut short for a moment.
        """
        content = self._look()
        if content == self._seen:
            self._doubtful = None
            return
        try:
            settings = self._judge(content)
        except ConfigInvalid as error:
            self._doubt(content, error)
        else:
            self._seen, self._doubtful = content, None
            self._apply(settings)

    def _look(self) -> bytes | str | None:
        """Return the content, or the reason why there is none to be had."""
        try:
            return read(self._paths.config)
        except ConfigInvalid as error:
            return error.message

    def _judge(self, content: bytes | str | None) -> Settings:
        if isinstance(content, bytes):
            return parse(content, self._paths.config)
        if content is None:
            raise ConfigInvalid(
                f"{self._paths.config} is gone; the last settings stay in effect",
                hint="put the file back, or restart Skep to run with the defaults",
            )
        raise ConfigInvalid(content, hint=f"check its permissions: ls -ld {self._paths.config}")

    def _doubt(self, content: bytes | str | None, error: ConfigInvalid) -> None:
        doubtful = content if content is not None else ""
        if self._doubtful == doubtful:
            self._seen, self._doubtful = content, None
            self._refused(error)
        else:
            self._doubtful = doubtful

    def _apply(self, settings: Settings) -> None:
        old, self.settings = self.settings, settings
        changed = tuple(name for name in Settings.model_fields if getattr(old, name) != getattr(settings, name))
        if changed:
            needs_restart = tuple(name for name in changed if name == "state_url")
            self._applied(Change(settings, changed, needs_restart))
