"""Read config.json: settings, or an error that names the field."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from skep.config.paths import Paths
from skep.config.problem import Problem, examine
from skep.config.settings import Settings
from skep.errors import ConfigInvalid

LARGEST_BYTES = 1_048_576


def load(paths: Paths) -> Settings:
    """Return the settings of the file, or the defaults when the usual file does not exist."""
    content = read(paths.config)
    if content is None:
        if paths.config_named:
            raise ConfigInvalid(
                f"SKEP_CONFIG names {paths.config}, and there is no such file",
                hint="create it with {} as its content, or unset SKEP_CONFIG",
            )
        return Settings()
    return parse(content, paths.config)


def read(path: Path) -> bytes | None:
    """Return the bytes of the file, None when there is none, ConfigInvalid when it cannot be read."""
    try:
        # O_NONBLOCK: a named pipe in this place must not make Skep wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            content = os.read(descriptor, LARGEST_BYTES + 1) if regular else None
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigInvalid(f"{path} cannot be read: {reason}", hint=f"check its permissions: ls -ld {path}") from error
    if content is None:
        raise ConfigInvalid(f"{path} is not a regular file", hint="put a JSON file in its place")
    if len(content) > LARGEST_BYTES:
        raise ConfigInvalid(f"{path} is larger than 1 MB", hint="a config.json is a few kilobytes at most")
    return content


def parse(content: bytes, path: Path) -> Settings:
    """Turn the bytes of a config.json into settings; ConfigInvalid names every wrong field."""
    judged = judge(content)
    if isinstance(judged, Settings):
        return judged
    raise refusal(judged, path)


def judge(content: bytes) -> Settings | list[Problem]:
    """Turn the bytes of a config.json into settings, or into the list of what is wrong with them."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return [Problem("", None, f"is not UTF-8 text (byte {error.start} is wrong)", "save it as UTF-8")]
    return examine(text)


def refusal(found: list[Problem], path: Path) -> ConfigInvalid:
    """Say in one error everything that must change in the file."""
    if len(found) == 1:
        message = f"{path}: {found[0]}"
    else:
        message = "\n  ".join([f"{path} is wrong in {len(found)} places", *map(str, found)])
    hints = dict.fromkeys(problem.hint for problem in found if problem.hint)
    return ConfigInvalid(message, hint="; ".join(hints) or "correct it, then run: skep config check")
