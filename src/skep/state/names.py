"""Names that people give: checked before they reach a table, a path or a terminal."""

from __future__ import annotations

import re
import secrets
from base64 import b32encode

from skep.errors import InvalidRequest

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_HIVE_ID = re.compile(r"hv-[a-z2-7]{16}")


def check_name(what: str, value: str) -> str:
    """Return the name if it is fit to be one, or raise InvalidRequest that shows it safely."""
    if _NAME.fullmatch(value) is None:
        raise InvalidRequest(
            f"{what} is not a valid name: {shown(value)}",
            hint="use 1 to 63 lower-case letters, digits and hyphens, beginning with a letter or a digit",
        )
    return value


def new_hive_id() -> str:
    return "hv-" + b32encode(secrets.token_bytes(10)).decode().lower()


def is_hive_id(value: str) -> bool:
    return _HIVE_ID.fullmatch(value) is not None


def shown(value: str) -> str:
    """Quote text from outside so that it can neither act on a terminal nor flood it."""
    return ascii(value[:60])[:60]
