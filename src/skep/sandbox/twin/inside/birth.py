"""Fork, and become a command."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import resource
import select
import signal
import struct
import termios
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from skep.sandbox.twin.inside.wire import (
    AT_CWD,
    AT_EXEC,
    AT_FORK,
    AT_LIMIT,
    AT_PAYLOAD,
    AT_TERMINAL,
    REFUSAL,
    Violation,
)

_HEADER = struct.Struct("=IIII")
_LIMIT = struct.Struct("=IIQQ")
_NO_NEW_PRIVILEGES, _DIE_WITH_PARENT = 38, 1
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_SCOPE_SIGNALS, _REFER, _PATH_BENEATH = 2, 1 << 13, 1
_IUTF8 = 0o40000
#: The longest name of a file.
_NAME_BYTES = 255

_libc = ctypes.CDLL(None, use_errno=True)


class Spawn(NamedTuple):
    """What a command needs to know to be one."""

    argv: list[bytes]
    env: dict[bytes, bytes]
    cwd: bytes
    limits: list[tuple[int, int, int]]

    @classmethod
    def read(cls, payload: bytes) -> Spawn:
        """Read what the controller packed, as it does for the native agent."""
        count, variables, limits, _ = _HEADER.unpack_from(payload)
        at = _HEADER.size
        wanted = []
        for _ in range(limits):
            kind, _, soft, hard = _LIMIT.unpack_from(payload, at)
            wanted.append((kind, soft, hard))
            at += _LIMIT.size
        texts = payload[at:].split(b"\0")
        if len(texts) != 2 + count + variables or count == 0:
            raise Violation("a command without its parts")
        pairs = (text.partition(b"=") for text in texts[1 + count : -1])
        return cls(texts[1 : 1 + count], {key: value for key, _, value in pairs}, texts[0], wanted)


class Refused(Exception):
    """The command could not be started."""

    def __init__(self, code: int, stage: int) -> None:
        super().__init__(code, stage)
        self.payload = REFUSAL.pack(code, stage)


def open_terminal(rows: int, columns: int) -> tuple[int, int]:
    """Make a terminal; return the twin's side and the program's."""
    try:
        master, slave = os.openpty()
    except OSError as error:
        raise Refused(error.errno or errno.EIO, AT_TERMINAL) from error
    modes = termios.tcgetattr(slave)
    modes[0] |= _IUTF8
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    resize(master, rows, columns)
    return master, slave


@functools.cache
def terminals_hang_up() -> bool:
    """Say whether the kernel tells when the last program has left a terminal; that of gVisor only carries bytes."""
    master, slave = os.openpty()
    os.close(slave)
    try:
        left = select.poll()
        left.register(master, 0)
        return bool(left.poll(0))
    finally:
        os.close(master)


def resize(master: int, rows: int, columns: int) -> None:
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Nursery:
    """Forks commands, from a thread of its own if that can keep their signals away from the twin.

    A command has the twin's user and could halt or kill it. Where the kernel can (Landlock, since Linux 6.12), all
    commands live in one domain: they may signal each other and nobody else.
    """

    def __init__(self, *, fenced: bool) -> None:
        self._job: Callable[[], Any] | None = None
        self._given, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._result: Any = None
        self._thread: threading.Thread | None = None
        if fenced:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def fork(self, spawn: Spawn, fds: tuple[int, int, int], *, terminal: bool) -> tuple[int, int]:
        """Return the number of the child, and a descriptor that ends when it has become the command."""
        hearing, telling = os.pipe2(os.O_CLOEXEC)
        twin = os.getpid()

        def forked() -> int:
            child = os.fork()
            if child == 0:
                _become(spawn, fds, telling, twin, terminal=terminal)
            return child

        try:
            return self._elsewhere(forked), hearing
        except OSError as error:
            os.close(hearing)
            raise Refused(error.errno or errno.EAGAIN, AT_FORK) from error
        finally:
            os.close(telling)

    def _elsewhere(self, job: Callable[[], int]) -> int:
        if self._thread is None:
            return job()
        self._job = job
        self._given.release()
        self._done.acquire()
        if isinstance(self._result, OSError):
            raise self._result
        return int(self._result)

    def _serve(self) -> None:
        _fence()
        while True:
            self._given.acquire()
            assert self._job is not None
            try:
                self._result = self._job()
            except OSError as error:
                self._result = error
            self._done.release()


def _fence() -> None:
    """Keep the signals of this thread and of all it forks to themselves, if the kernel can."""
    # Moving and linking files between folders is forbidden in every domain that does not allow it by name.
    rules = struct.pack("=QQQ", _REFER, 0, _SCOPE_SIGNALS)
    fd = int(_libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0))
    if fd < 0:
        return
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    _libc.syscall(_ADD_RULE, fd, _PATH_BENEATH, struct.pack("=Qi", _REFER, root), 0)
    os.close(root)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _libc.syscall(_RESTRICT_SELF, fd, 0)
    os.close(fd)


def _become(spawn: Spawn, fds: tuple[int, int, int], telling: int, twin: int, *, terminal: bool) -> NoReturn:
    """Turn a fork into the command, or say why that cannot be. Nothing here takes a lock that another thread holds."""
    stage = AT_FORK
    try:
        os.setsid()
        _libc.prctl(_DIE_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != twin:
            os._exit(1)
        stage = AT_TERMINAL
        if terminal:
            fcntl.ioctl(fds[0], termios.TIOCSCTTY, 0)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        _usual_signals()
        os.umask(0o022)
        _offer_to_killer()
        stage = AT_LIMIT
        for kind, soft, hard in spawn.limits:
            _limit(kind, soft, hard)
        stage = AT_CWD
        os.chdir(spawn.cwd)
        stage = AT_EXEC
        _execute(spawn)
    except OSError as error:
        os.write(telling, REFUSAL.pack(error.errno or errno.EIO, stage))
    except ValueError:
        os.write(telling, REFUSAL.pack(errno.EINVAL, AT_PAYLOAD if stage == AT_EXEC else stage))
    finally:
        os._exit(1)


def _execute(spawn: Spawn) -> None:
    try:
        os.execvpe(spawn.argv[0], spawn.argv, spawn.env)  # noqa: S606 - the controller chose it
    except OSError as error:
        # What is too long for gVisor are the arguments, though it says that it is the name.
        if error.errno == errno.ENAMETOOLONG and len(spawn.argv[0]) <= _NAME_BYTES:
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG)) from error
        # A text without a first line that names its interpreter is a script, as for execvp(3).
        if error.errno != errno.ENOEXEC or b"/" not in spawn.argv[0]:
            raise
        os.execve("/bin/sh", [b"sh", *spawn.argv], spawn.env)  # noqa: S606


def _usual_signals() -> None:
    """Undo what Python, and whoever started it, chose to ignore."""
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _offer_to_killer() -> None:
    """Out of memory, the kernel shall end commands before it ends the twin."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    except OSError:
        return
    try:
        os.write(fd, b"1000")
    except OSError:
        pass
    finally:
        os.close(fd)


def _limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit, lowered to what this process has itself: nobody can hand out more."""
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))
