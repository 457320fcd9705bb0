"""What SQLite alone can do on this machine: the least that any log on it must cost."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

CREATE = "CREATE TABLE log (hive TEXT, seq INTEGER, record TEXT, hash BLOB, PRIMARY KEY (hive, seq))"
INSERT = "INSERT INTO log VALUES ('hv-a', ?, ?, ?)"
HASH = bytes(32)

Waiting = tuple[str, threading.Event]


def one_sync_per_event(file: Path, record: str, count: int) -> float:
    """Commit each event by itself, from one thread; return events per second."""
    with closing(_open(file)) as connection:
        before = time.perf_counter()
        for seq in range(count):
            connection.execute(INSERT, (seq, record, HASH))
        return count / (time.perf_counter() - before)


def group_commit(file: Path, record: str, count: int, *, threads: int) -> float:
    """Let threads queue events for one writer, each waiting for its commit; return events per second."""
    waiting: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()

    def append() -> None:
        for _ in range(count // threads):
            done = threading.Event()
            waiting.put((record, done))
            done.wait()

    writer = threading.Thread(target=_write, args=(file, waiting))
    appenders = [threading.Thread(target=append) for _ in range(threads)]
    before = time.perf_counter()
    for thread in (writer, *appenders):
        thread.start()
    for thread in appenders:
        thread.join()
    took = time.perf_counter() - before
    waiting.put(None)
    writer.join()
    return count // threads * threads / took


def _write(file: Path, waiting: queue.SimpleQueue[Waiting | None]) -> None:
    seq = 0
    with closing(_open(file)) as connection:
        while True:
            batch = [waiting.get()]
            while not waiting.empty():
                batch.append(waiting.get())
            entries = [entry for entry in batch if entry is not None]
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(INSERT, [(seq + n, record, HASH) for n, (record, _) in enumerate(entries)])
            connection.execute("COMMIT")
            seq += len(entries)
            for _, done in entries:
                done.set()
            if len(entries) < len(batch):
                return


def _open(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(CREATE)
    return connection
