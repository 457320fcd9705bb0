"""Log lines are JSON off a terminal, readable on one, kept in a rotating file, and never hold a secret."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

import skep
from skep.app.logs import SharedRotatingFile, start_logs, stop_logs

PLANTED = (
    "sk-ant-REDACTED",
    "ghp_plantedplantedplantedplanted01",
    "AKIAPLANTEDPLANTED01",
    "hunter2-planted",
    "planted-by-value",
    "planted private words",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    stop_logs()
    structlog.reset_defaults()


def refuse(reason: str) -> None:
    raise ValueError(reason)


def log_every_planted_secret() -> None:
    log = structlog.get_logger("skep.test")
    log.warning("asked", api_key=PLANTED[0], url=f"postgresql://u:{PLANTED[3]}@host/db")
    log.warning("nested", deep=[{"headers": {"x": f"Bearer {PLANTED[1]}"}}, (PLANTED[2],)])
    log.warning("said %s", PLANTED[4])
    log.bind(memory_md=PLANTED[5]).warning("remembered", skill={"body": PLANTED[5]})
    logging.getLogger("some.library").warning("connecting with %s", PLANTED[0])
    try:
        refuse(f"refused {PLANTED[1]} and {PLANTED[4]}")
    except ValueError:
        log.exception("failed", password=PLANTED[3])
        logging.getLogger("some.library").exception("failed too")


def test_no_planted_secret_reaches_a_pipe_or_the_file(tmp_path: Path) -> None:
    stream = io.StringIO()
    start_logs(file=tmp_path / "skep.log", secrets=["planted-by-value"], stream=stream)
    log_every_planted_secret()
    for text in (stream.getvalue(), (tmp_path / "skep.log").read_text()):
        lines = [json.loads(line) for line in text.splitlines()]
        assert len(lines) == 7
        assert not [secret for secret in PLANTED if secret in text]
        assert "ValueError: refused [secret] and [secret]" in lines[5]["exception"]


def test_no_planted_secret_reaches_a_terminal(tmp_path: Path) -> None:
    stream = Terminal()
    start_logs(file=None, secrets=["planted-by-value"], stream=stream)
    log_every_planted_secret()
    assert "remembered" in stream.getvalue()
    assert not [secret for secret in PLANTED if secret in stream.getvalue()]


def test_without_masking_every_planted_secret_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the planted secrets do travel this way when nothing stops them."""
    monkeypatch.setattr("skep.app.logs.Masking", lambda known: lambda logger, method, fields: fields)
    stream = io.StringIO()
    start_logs(file=None, stream=stream)
    log_every_planted_secret()
    assert [secret for secret in PLANTED if secret in stream.getvalue()] == list(PLANTED)


def test_a_line_says_when_who_how_grave_and_what() -> None:
    stream = io.StringIO()
    start_logs(file=None, stream=stream)
    structlog.get_logger("skep.state").warning("slow", took_s=2)
    line = json.loads(stream.getvalue())
    assert line.pop("at").endswith("Z")
    assert line == {"event": "slow", "logger": "skep.state", "level": "warning", "took_s": 2}


def test_one_event_is_one_line_even_with_newlines_in_it() -> None:
    stream = io.StringIO()
    start_logs(file=None, stream=stream)
    structlog.get_logger("skep").warning("two\nlines", text="a\u2028b\r\nc")
    assert len(stream.getvalue().splitlines()) == 1


def test_the_file_takes_more_than_the_stream(tmp_path: Path) -> None:
    stream = io.StringIO()
    start_logs(file=tmp_path / "skep.log", stream=stream)
    structlog.get_logger("skep").info("by the way")
    assert stream.getvalue() == ""
    assert "by the way" in (tmp_path / "skep.log").read_text()


def test_debug_shows_skeps_own_lines_and_not_those_of_libraries() -> None:
    stream = io.StringIO()
    start_logs(file=None, stream=stream, level=logging.DEBUG)
    structlog.get_logger("skep.state").debug("ours")
    logging.getLogger("aiosqlite").debug("theirs")
    assert "ours" in stream.getvalue()
    assert "theirs" not in stream.getvalue()


def test_others_cannot_read_the_log(tmp_path: Path) -> None:
    start_logs(file=tmp_path / "log" / "skep.log", stream=io.StringIO())
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "log" / "skep.log").stat().st_mode & 0o777 == 0o600


def test_a_log_file_that_cannot_be_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stream = io.StringIO()
    start_logs(file=tmp_path / "file" / "skep.log", stream=stream)
    assert json.loads(stream.getvalue())["event"] == "log_file_unusable"


def test_a_symbolic_link_in_place_of_the_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "skep.log").symlink_to(tmp_path / "victim")
    start_logs(file=tmp_path / "skep.log", stream=io.StringIO())
    assert not (tmp_path / "victim").exists()


def test_the_file_rotates_and_the_oldest_goes(tmp_path: Path) -> None:
    handler = SharedRotatingFile(tmp_path / "skep.log", largest_bytes=1000, kept=2)
    for number in range(100):
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, f"line {number:03} {'.' * 80}", None, None))
    handler.close()
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["skep.log", "skep.log.1", "skep.log.2", "skep.log.lock"]
    assert "line 099" in (tmp_path / "skep.log").read_text()
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())


def test_a_log_that_cannot_be_written_loses_the_line_and_not_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logs(file=None, secrets=["planted-by-value"], stream=FullDisk())
    structlog.get_logger("skep").warning("planted-by-value")
    err = capsys.readouterr().err
    assert "a log line of skep was lost" in err
    assert "planted" not in err


WRITER = """
import sys, logging
from pathlib import Path
from skep.app.logs import SharedRotatingFile
handler = SharedRotatingFile(Path(sys.argv[1]), largest_bytes=20_000, kept=20)
for number in range(500):
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, f"{sys.argv[2]} {number:04} {'.' * 80}", None, None))
"""


def test_several_processes_share_one_file_without_losing_or_mixing_lines(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(skep.__file__).parents[1])}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "skep.log"), name], env=environment)
        for name in "abc"
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    lines = [line for file in tmp_path.glob("skep.log*") for line in file.read_text().splitlines()]
    assert sorted(line[:6] for line in lines) == sorted(f"{name} {n:04}" for name in "abc" for n in range(500))
