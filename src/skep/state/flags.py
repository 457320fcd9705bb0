"""The flags of a hive, and how far each one is rolled out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256

from sqlalchemy import select

from skep.errors import InvalidRequest
from skep.state.database import Database
from skep.state.names import shown
from skep.state.schema import rollouts


@dataclass(frozen=True, slots=True)
class Flags:
    """What a hive may use. What writes skills by itself is off until somebody asks for it."""

    sandbox_enabled: bool = True
    file_memory_enabled: bool = True
    self_healing_enabled: bool = True
    skill_authoring_enabled: bool = False

    def changed(self, changes: Mapping[str, object]) -> Flags:
        """Return these flags with some of them set; raise InvalidRequest for what is no flag or no bool."""
        for flag, value in changes.items():
            check_flag(flag)
            if not isinstance(value, bool):
                raise InvalidRequest(f"{flag} cannot be {shown(str(value))}", hint="a flag is true or false")
        return Flags(**(asdict(self) | dict(changes)))

    def since(self, before: Flags) -> dict[str, bool]:
        """Return the flags that differ from `before`, with their value now."""
        return {flag: getattr(self, flag) for flag in FLAGS if getattr(self, flag) != getattr(before, flag)}


DEFAULT = Flags()
FLAGS = tuple(field.name for field in fields(Flags))


def check_flag(flag: str) -> str:
    if flag not in FLAGS:
        raise InvalidRequest(f"there is no flag {shown(flag)}", hint=f"the flags are {', '.join(FLAGS)}")
    return flag


def bucket(flag: str, account_id: str) -> int:
    """Place an account for a flag, from 0 to 99: always alike, and unrelated from flag to flag."""
    return int.from_bytes(sha256(f"{flag}:{account_id}".encode()).digest()[:8], "big") % 100


#: For how long percentages are taken to be those that were read last.
_FRESH_S = 1.0


class Rollouts:
    """The share of accounts, in percent, that each flag can take effect for; 100 where nothing was set."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: tuple[float, dict[str, int]] | None = None

    async def percents(self) -> dict[str, int]:
        async with self._database.read() as connection:
            rows = (await connection.execute(select(rollouts.c.flag, rollouts.c.percent))).all()
        return dict.fromkeys(FLAGS, 100) | {row.flag: row.percent for row in rows if row.flag in FLAGS}

    async def set(self, flag: str, percent: int) -> None:
        """Roll a flag out to a share of the accounts: a larger share keeps every account of a smaller one."""
        check_flag(flag)
        if isinstance(percent, bool) or not isinstance(percent, int) or not 0 <= percent <= 100:
            raise InvalidRequest(f"{shown(str(percent))} is not a percentage", hint="use a whole number from 0 to 100")
        statement = self._database.insert(rollouts).values(flag=flag, percent=percent)
        statement = statement.on_conflict_do_update(index_elements=[rollouts.c.flag], set_={"percent": percent})
        async with self._database.write() as connection:
            await connection.execute(statement)
        self._known = None

    async def in_effect(self, flags: Flags, account_id: str) -> Flags:
        """Return the flags that are on for the hive and rolled out to its account.

        What another process has set is seen within a second.
        """
        if self._known is None or time.monotonic() - self._known[0] > _FRESH_S:
            self._known = time.monotonic(), await self.percents()
        percents = self._known[1]
        return Flags(
            **{flag: getattr(flags, flag) and bucket(flag, account_id) < percent for flag, percent in percents.items()}
        )
