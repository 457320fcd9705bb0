"""The key of a conversation, and the session that it stands for.

A key comes from outside and may be anything. It is never part of a path, a command or a statement: it is compared, and
hashed. What cannot be told apart from another on a screen is still another key.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING
from uuid import UUID, uuid5

from skep.errors import InvalidRequest

if TYPE_CHECKING:
    from skep.state.hives import Hive

KEY_BYTES = 512

#: Any fixed one will do; it must never change, or every session would lose its workspace.
_NAMESPACE = UUID("6f0c2f7a-5d0e-5f7b-9a44-7c1d1e8a9b53")
_CHANNEL = re.compile(r"[a-z][a-z0-9_-]{0,31}:")
#: Control characters, surrogates, and what reorders or hides the text around it.
_UNWANTED = frozenset(("Cc", "Cs", "Cf", "Zl", "Zp"))


def check_key(key: str) -> str:
    """Return the key of a thread, or raise InvalidRequest saying what is wrong with it."""
    if not _CHANNEL.match(key) or not key.partition(":")[2].strip():
        raise _refused(key, "it names no channel and thread")
    if any(unicodedata.category(character) in _UNWANTED for character in key):
        raise _refused(key, "it has characters that do not print")
    if len(key.encode()) > KEY_BYTES:
        raise _refused(key, f"it is longer than {KEY_BYTES} bytes")
    return key


def hive_key(hive_id: str) -> str:
    """Return the key that all threads of a hive share when it has one workspace for them."""
    return f"hive:{hive_id}"


def key_of(hive: Hive, thread: str) -> str:
    """Return the key of the session of a thread: its own, or the one that all threads of the hive share."""
    checked = check_key(thread)
    return checked if hive.upkeep.threads == "thread" else hive_key(hive.id)


def session_id(account_id: str, hive_id: str, key: str) -> str:
    """Derive the id of a session, and of its workspace: a lost row can be found again by it, and none is guessed."""
    return str(uuid5(_NAMESPACE, "\0".join((account_id, hive_id, key))))


def _refused(key: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{key[:60]!a} cannot be the key of a thread: {why}",
        hint="write it as channel:thread, for instance slack:C1:1700.1, dm:U7, cli:default or api:anything",
    )
