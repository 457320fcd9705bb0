"""A task whose model is shown a picture keeps no bytes of it, and goes on elsewhere as it was."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.models.servers import Call, ModelServer, Received, Say, Silence, Turn
from tests.sessions.yard import ACCOUNT, open_yard, prepare_hive, prepare_home, remove
from tests.tasks.conftest import until
from tests.tasks.shop import workshop_at

from skep.models.models import Models
from skep.models.spec import ModelSpec
from skep.tasks.workshop import open_worker

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Painter:
    """Has a picture made and looks at it; what it sees it says only once it may."""

    def __init__(self) -> None:
        self.may_speak = threading.Event()
        self.seen: list[Received] = []

    def __call__(self, asked: Received) -> Turn:
        if "Decide how a prompt is to be answered" in asked.system:
            return Say(value={"kind": "one", "why": "one thing"})
        self.seen.append(asked)
        match asked.results:
            case 0:
                return Say(calls=(Call("run_command", {"command": f"echo {PNG} | base64 -d > bee.png"}),))
            case 1:
                return Say(calls=(Call("read_file", {"path": "bee.png"}),))
            case _:
                done = Call("finish", {"reply": "A bee.", "confidence": 0.9})
                return Say(calls=(done,)) if self.may_speak.is_set() else Silence()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = prepare_home(tmp_path / "home")
    yield home
    remove(home)


async def test_a_picture_is_shown_again_by_the_worker_that_goes_on(ready_sqlite_url: str, home: Path) -> None:
    await prepare_hive(ready_sqlite_url)
    painter = Painter()
    with ModelServer(painter) as server:
        spec = ModelSpec("openai", "gpt-4o", base_url=server.openai, key="k", vision=True)
        async with (
            Models([spec]) as models,
            open_yard(home, ready_sqlite_url) as yard,
            open_worker(workshop_at(yard, models)) as worker,
        ):
            task = await worker.tasks.submit(yard.hive, "Paint a bee", actor="me")
            await until(lambda: len(painter.seen) == 3)
        painter.may_speak.set()
        async with (
            Models([spec]) as models,
            open_yard(home, ready_sqlite_url) as yard,
            open_worker(workshop_at(yard, models)) as worker,
        ):
            task = await worker.tasks.wait(task.id, account_id=ACCOUNT, timeout_s=60)
            events = [one.event.model_dump_json() for one in await yard.log.page(yard.hive.id, limit=200)]
    assert (task.status, task.reply) == ("succeeded", "A bee.")
    assert [asked.results for asked in painter.seen] == [0, 1, 2, 2]
    assert [asked.images for asked in painter.seen] == [[], [], *[[base64.b64decode(PNG)]] * 2]
    observed = [event for event in events if '"observed"' in event and "file_read" in event]
    assert len(observed) == 1 and '"picture":"/workspace/bee.png"' in observed[0] and PNG[:40] not in observed[0]
