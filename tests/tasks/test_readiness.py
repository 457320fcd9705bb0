"""A worker that does not work says so, and says that it does when it does again."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from tests.tasks.conftest import Open, until
from tests.tasks.test_worker import ask, echo

from skep.errors import SkepError
from skep.state.accounts import Accounts
from skep.state.database import Database
from skep.state.hives import Hive, Hives
from skep.state.leases import Leases
from skep.state.location import Location
from skep.state.log import EventLog
from skep.tasks.worker import Worker, run_worker


def trouble(worker: Worker) -> str:
    try:
        worker.check()
    except SkepError as error:
        return error.message
    return ""


async def is_carried(worker: Worker, hive: Hive) -> bool:
    task = await ask(worker.tasks, hive)
    return (await worker.tasks.wait(task.id, account_id="bees", timeout_s=20)).status == "succeeded"


async def test_a_worker_whose_engine_is_gone_is_not_ready(worker: Open, hive: Hive) -> None:
    from dbos import DBOS

    async with worker(echo, ttl_s=1.5) as one:
        assert await is_carried(one, hive)
        assert trouble(one) == ""
        await asyncio.to_thread(DBOS.destroy)
        await until(lambda: trouble(one) != "")


async def test_a_worker_that_others_may_take_for_dead_is_not_ready(
    worker: Open, hive: Hive, database: Database
) -> None:
    async with worker(echo, ttl_s=0.4) as one:
        assert database.location.path is not None
        with closing(sqlite3.connect(Path(database.location.path), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await until(lambda: "others have not heard of this process" in trouble(one))
            other.execute("ROLLBACK")
        await until(lambda: trouble(one) == "")
        assert await is_carried(one, hive)


async def test_a_loop_of_a_worker_that_is_broken_off_is_begun_again(worker: Open, hive: Hive) -> None:
    async with worker(echo) as one:
        for task in asyncio.all_tasks():
            if "Worker._dispatch" in repr(task.get_coro()):
                task.cancel()
        assert await is_carried(one, hive)
        assert trouble(one) == ""


@pytest.mark.service
async def test_a_worker_is_ready_again_when_its_database_is_back(postgres_server: str, postgres_url: str) -> None:
    name = Location.parse(postgres_url).url.database

    def let_in(allowed: bool) -> None:
        with psycopg.connect(postgres_server, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS {allowed}".encode())
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])

    database = await Database.open(postgres_url)
    log = EventLog(database)
    await Accounts(database).create("bees")
    hive = await Hives(database, log).create("garden", account_id="bees", actor="me")
    async with run_worker(database, log, Leases(database), host="here", carry=echo, ttl_s=1.5) as one:
        assert await is_carried(one, hive)
        await asyncio.to_thread(let_in, False)
        await until(lambda: trouble(one) != "")
        await asyncio.to_thread(let_in, True)
        await until(lambda: trouble(one) == "")
        assert await is_carried(one, hive)
    await log.close()
    await database.close()
