"""Set up logging: for people on a terminal, JSON lines elsewhere, always masked, and a rotating file."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.typing import Processor

from skep.app.masking import Masking

LARGEST_BYTES = 5 * 1024 * 1024
KEPT_FILES = 5


def start_logs(
    *,
    file: Path | None,
    secrets: Sequence[str] = (),
    stream: TextIO | None = None,
    level: int = logging.WARNING,
) -> None:
    """Send the log lines of the process to the stream (stderr) from `level` up, to the file from INFO up.

    Repeating the call replaces what the last one set up. A file that cannot be opened is reported on the
    stream and left out: logging never stops the work.
    """
    stream = stream or sys.stderr
    masking = Masking(tuple(secrets))
    to_stream = _LossySafe(stream)
    to_stream.setLevel(level)
    to_stream.setFormatter(_formatter(masking, pretty=stream.isatty()))
    stop_logs()
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(to_stream)
    # Only Skep's own loggers go below INFO: aiosqlite alone writes two lines for each statement there.
    logging.getLogger("skep").setLevel(min(level, logging.INFO))
    # Migrations report each step at INFO, which is of no interest to whoever reads the log of a program.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    _configure_structlog()
    if file is not None:
        _add_file(root, file, masking)


def stop_logs() -> None:
    """Close the handlers that `start_logs` added."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _LossySafe | SharedRotatingFile):
            root.removeHandler(handler)
            handler.close()


def _add_file(root: logging.Logger, file: Path, masking: Masking) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handler = SharedRotatingFile(file)
    except OSError as error:
        structlog.get_logger("skep").warning("log_file_unusable", file=str(file), reason=error.strerror)
        return
    handler.setLevel(logging.INFO)
    handler.setFormatter(_formatter(masking, pretty=False))
    root.addHandler(handler)


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        structlog.processors.StackInfoRenderer(),
    ]


def _configure_structlog() -> None:
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(),
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _formatter(masking: Masking, *, pretty: bool) -> logging.Formatter:
    # Masking comes last before rendering, when tracebacks are text already, and for lines of libraries too.
    render: Processor = (
        structlog.dev.ConsoleRenderer(
            timestamp_key="at", exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
        )
        if pretty
        else structlog.processors.JSONRenderer(ensure_ascii=True)
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared(),
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            masking,
            render,
        ],
    )


class _LossySafe(logging.StreamHandler[TextIO]):
    """A stream handler that drops a line it cannot write; the usual one prints the unmasked record."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        _report_loss(record)


class SharedRotatingFile(RotatingFileHandler):
    """A rotating file that several processes may write to.

    Each line is one append. Before each, the file is opened again if another process has rotated it, and the
    rotation itself happens under a lock.
    """

    def __init__(self, file: Path, *, largest_bytes: int = LARGEST_BYTES, kept: int = KEPT_FILES) -> None:
        super().__init__(file, maxBytes=largest_bytes, backupCount=kept, encoding="utf-8", errors="replace")

    def _open(self) -> Any:
        descriptor = os.open(
            self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._follow()
        except OSError:
            self.handleError(record)
            return
        super().emit(record)

    def doRollover(self) -> None:  # noqa: N802
        with open(f"{self.baseFilename}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if Path(self.baseFilename).stat().st_size >= self.maxBytes // 2:  # not rotated meanwhile
                super().doRollover()
        self._follow()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        _report_loss(record)

    def _follow(self) -> None:
        """Open the file again when the one we hold is no longer the one at the path."""
        try:
            there = Path(self.baseFilename).stat()
        except FileNotFoundError:
            there = None
        ours = os.fstat(self.stream.fileno()) if self.stream else None
        if there is None or ours is None or (there.st_ino, there.st_dev) != (ours.st_ino, ours.st_dev):
            if self.stream:
                self.stream.close()
            self.stream = self._open()


def _report_loss(record: logging.LogRecord) -> None:
    error = sys.exc_info()[1]
    reason = error.strerror if isinstance(error, OSError) else type(error).__name__
    try:
        sys.stderr.write(f"a log line of {record.name} was lost: {reason}\n")
    except (OSError, ValueError):  # stderr itself is closed or full: there is nobody left to tell
        return
