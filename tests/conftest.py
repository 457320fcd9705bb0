"""Fixtures for every test: a fresh, empty database on each of the two kinds Skep supports; and a bound for all."""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import gc
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hypothesis
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from tests import beside
from tests.ordering import put_long_first
from tests.warm import warm

if TYPE_CHECKING:
    import psycopg

    from skep.state.database import Database

SERVER = Path(__file__).with_name("postgres_server.py")
START_S = 90
FOLDER = pytest.StashKey[tuple[str, int]]()
BESIDE = pytest.StashKey[Path]()


# The same examples in every run, and nothing kept: the tree may belong to somebody else.
hypothesis.settings.register_profile("skep", database=None, derandomize=True)
hypothesis.settings.load_profile("skep")


def pytest_configure(config: pytest.Config) -> None:
    """Choose one folder and one process that PostgreSQL lives with, for this session and all its workers."""
    shared = getattr(config, "workerinput", {}).get("postgres")
    config.stash[FOLDER] = tuple(shared) if shared else (str(_folder()), os.getpid())
    config.stash[BESIDE] = Path(f"{config.stash[FOLDER][0]}-beside")
    if not shared:
        for name in ("beside", "warm"):
            config.add_cleanup(partial(shutil.rmtree, f"{config.stash[FOLDER][0]}-{name}", ignore_errors=True))


def _folder() -> Path:
    # A Unix socket's path has room for about 100 characters, so pytest's own long folders will not do.
    return Path(tempfile.gettempdir()) / f"skep-pg-{uuid.uuid4().hex[:12]}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    node.workerinput["postgres"] = node.config.stash[FOLDER]  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the collector of garbage what stays to the end: thousands of tests, and all that they import."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    beside.put_last(items)
    put_long_first(items, getattr(config, "workerinput", {}).get("workercount", 1))


def pytest_collection_finish(session: pytest.Session) -> None:
    # The process that hands out tests to workers has none of its own.
    if not session.config.option.collectonly:
        beside.start(session.config.stash[BESIDE], session.items)


@pytest.fixture(scope="session")
def found_beside(pytestconfig: pytest.Config) -> Callable[[str], beside.Ran]:
    """Give how a program ended that runs beside the tests."""
    return partial(beside.found, pytestconfig.stash[BESIDE])


@pytest.fixture(scope="session")
def warm_scripts(pytestconfig: pytest.Config) -> Path:
    """Give a folder with the programs `skep` and `python`, which need not load anything."""
    folder, owner = pytestconfig.stash[FOLDER]
    return warm(Path(f"{folder}-warm"), owner)


#: How much longer than its time limit a test may take to let go, before the process that runs it is given up.
LETTING_GO_S = 60


def _watch(item: pytest.Item) -> None:
    mark = item.get_closest_marker("timeout")
    limit_s = float(mark.args[0] if mark and mark.args else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(
        limit_s + LETTING_GO_S, file=item.config.stash[fault_handler_stderr_fd_key], exit=True
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a process whose test neither ends nor can be interrupted, such as one that waits for a thread."""
    _watch(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Go on watching a test that has failed: pytest itself stops there, and its fixtures may still hang."""
    if isinstance(node, pytest.Item):
        _watch(node)


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> str:
    """Give the URL of a running PostgreSQL, started by the first test of the session that asks."""
    folder, owner = request.config.stash[FOLDER]
    place = Path(folder)
    place.mkdir(mode=0o755, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "data").exists() and not (place / "error").exists():
            _launch(place, owner)
        return _await_url(place)


def _launch(place: Path, owner: int) -> None:
    # Its own session: an interrupt typed at the tests must not reach the server before them. Spawned bare,
    # since nobody waits for it: it ends after this process does.
    null, log = os.devnull, str(place / "guardian.log")
    create = os.O_WRONLY | os.O_CREAT
    os.posix_spawn(
        sys.executable,
        [sys.executable, str(SERVER), str(place), str(owner)],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, null, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, log, create, 0o600),
        ],
        setsid=True,
    )


def _await_url(place: Path) -> str:
    deadline = time.monotonic() + START_S
    while not (place / "url").exists():
        if (place / "error").exists():
            _missing((place / "error").read_text())
        if time.monotonic() > deadline:
            _missing(f"no answer within {START_S} s: {(place / 'guardian.log').read_text()}")
        time.sleep(0.02)
    return (place / "url").read_text()


def _missing(reason: str) -> NoReturn:
    message = f"PostgreSQL is not available: {reason}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@contextmanager
def _fresh_database(server: str) -> Iterator[str]:
    import psycopg

    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        yield server.replace("/postgres?", f"/{name}?")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """Give the URL of an empty database on the session's PostgreSQL."""
    with _fresh_database(postgres_server) as url:
        yield url


@pytest.fixture
def another_postgres_url(postgres_server: str) -> Iterator[str]:
    """Give the URL of a second empty database, for tests that need two."""
    with _fresh_database(postgres_server) as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """Give the URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'state' / 'skep.db'}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.service)])
def database_url(request: pytest.FixtureRequest) -> str:
    """Run the test once per kind of database, each time with an empty one."""
    url: str = request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param])
    return url


class Ready:
    """A database on the session's PostgreSQL that has the current schema and no rows, again and again."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._pristine: str | None = None
        self._made: tuple[str, object] | None = None

    @contextmanager
    def lent(self) -> Iterator[str]:
        """Give its URL. What a test leaves in it is removed, and if that is another schema, the whole of it."""
        url, shape = self._made = self._made or self._make()
        yield url
        with psycopg_connection(url) as connection:
            connection.execute(_ALONE)
            if connection.execute(_SHAPE).fetchall() == shape:
                connection.execute(_EMPTY)
            else:
                self._made = None

    def _make(self) -> tuple[str, object]:
        """Copy the one that nobody has used: PostgreSQL does it much faster than the schema is built."""
        from skep.state.database import migrate

        if self._pristine is None:
            self._pristine = self._create("")
            asyncio.run(migrate(self._url(self._pristine)))
        url = self._url(self._create(f" TEMPLATE {self._pristine}"))
        with psycopg_connection(url) as connection:
            return url, connection.execute(_SHAPE).fetchall()

    def _create(self, how: str) -> str:
        name = f"ready_{uuid.uuid4().hex}"
        with psycopg_connection(self._server) as connection:
            connection.execute(f"CREATE DATABASE {name}{how}".encode())
        return name

    def _url(self, name: str) -> str:
        return self._server.replace("/postgres?", f"/{name}?")


def psycopg_connection(url: str) -> psycopg.Connection[tuple[object, ...]]:
    import psycopg

    return psycopg.connect(url, autocommit=True)


_ALONE = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND pid != pg_backend_pid()
"""
#: Everything in the schema that could be changed, in words.
_SHAPE = """
SELECT relname, relkind, relnatts, tgname, tgenabled, version_num
FROM pg_class LEFT JOIN pg_trigger ON tgrelid = pg_class.oid, skep.skep_alembic_version
WHERE relnamespace NOT IN (SELECT oid FROM pg_namespace WHERE nspname LIKE 'pg_%' OR nspname = 'information_schema')
ORDER BY relname, tgname
"""
#: The log takes no change while its triggers are on.
_EMPTY = """
DO $$ DECLARE found text; fired text; used boolean;
BEGIN
  FOR found IN SELECT tablename FROM pg_tables WHERE schemaname = 'skep' AND tablename != 'skep_alembic_version' LOOP
    EXECUTE 'SELECT EXISTS (SELECT FROM skep.' || found || ')' INTO used;
    CONTINUE WHEN NOT used;
    EXECUTE 'ALTER TABLE skep.' || found || ' DISABLE TRIGGER ALL';
    EXECUTE 'DELETE FROM skep.' || found;
    EXECUTE 'ALTER TABLE skep.' || found || ' ENABLE TRIGGER ALL';
    FOR fired IN SELECT tgname FROM pg_trigger WHERE tgrelid = ('skep.' || found)::regclass AND NOT tgisinternal LOOP
      EXECUTE 'ALTER TABLE skep.' || found || ' ENABLE ALWAYS TRIGGER ' || fired;
    END LOOP;
  END LOOP;
END $$
"""


@pytest.fixture(scope="session")
def ready_postgres(postgres_server: str) -> Ready:
    return Ready(postgres_server)


@pytest.fixture(scope="session")
def ready_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a SQLite file that has the current schema and no rows, to be copied."""
    from skep.state.database import migrate

    file = tmp_path_factory.mktemp("ready") / "skep.db"
    asyncio.run(migrate(f"sqlite:///{file}"))
    return file


@pytest.fixture
def ready_sqlite_url(ready_sqlite: Path, tmp_path: Path) -> str:
    """Give the URL of a SQLite file that has the current schema and no rows."""
    file = tmp_path / "state" / "skep.db"
    file.parent.mkdir(mode=0o700)
    shutil.copy(ready_sqlite, file)
    return f"sqlite:///{file}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.service)])
def ready_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once per kind of database, each time with one that has the current schema and no rows."""
    if request.param == "sqlite":
        yield request.getfixturevalue("ready_sqlite_url")
        return
    ready: Ready = request.getfixturevalue("ready_postgres")
    with ready.lent() as url:
        yield url


@pytest.fixture
async def database(ready_url: str) -> AsyncIterator[Database]:
    """Give an open database with the current schema, on each kind."""
    from skep.state.database import Database

    opened = await Database.open(ready_url)
    yield opened
    await opened.close()
