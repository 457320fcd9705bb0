"""Fixtures for the tests of workers: one real computer for each module, and a desk at it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic_ai.messages import ToolCallPart
from tests.sessions.yard import ACCOUNT, Yard, open_yard, prepare_hive, prepare_home, remove

from skep.agent.actions import Action, Stamp
from skep.agent.desk import Desk
from skep.agent.observations import Observation, Trouble
from skep.agent.toolbox import Toolbox
from skep.app.household import Household

_NUMBERS = count(1)


def stamp(call: str | None = None) -> Stamp:
    number = next(_NUMBERS)
    return Stamp(run="tsk_1", step=number, call=call or f"{number}-1", at=datetime.now(UTC), actor="worker")


@dataclass(slots=True)
class Bench:
    """A worker's desk, at which a test takes the place of the model."""

    yard: Yard
    desk: Desk
    household: Household
    toolbox: Toolbox

    def read(self, tool: str, **arguments: Any) -> Action:
        action = self.toolbox.parse(ToolCallPart(tool, arguments), stamp())
        assert not isinstance(action, Trouble), action.message
        return action

    async def do(self, tool: str, **arguments: Any) -> Observation:
        """Call a tool as a model would, whatever would be ruled on it."""
        return await self.toolbox.perform(self.read(tool, **arguments), self.desk)

    async def trouble(self, tool: str, **arguments: Any) -> Trouble:
        seen = await self.do(tool, **arguments)
        assert isinstance(seen, Trouble), seen
        return seen


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = prepare_home(tmp_path_factory.mktemp("agent") / "home")
    yield home
    remove(home)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bench(home: Path, ready_sqlite: Path) -> AsyncIterator[Bench]:
    file = home / "skep.db"
    shutil.copy(ready_sqlite, file)
    await prepare_hive(f"sqlite:///{file}")
    async with open_yard(home, f"sqlite:///{file}") as yard:
        household = Household(home, yard.hive.id, ACCOUNT, yard.hive.name)
        household.settle()
        desk = Desk(yard.resolve, household=household.folder, skills=household.skills)
        yield Bench(yard, desk, household, Toolbox(browser=True))
        await desk.close()
