"""Serve one controller over standard input and output, until it hangs up."""

from __future__ import annotations

import binascii
import ctypes
import os
import resource
import signal
import sys
import termios
import time
import tty
import warnings
from collections.abc import Callable

from skep.sandbox.twin.inside import wire
from skep.sandbox.twin.inside.birth import Nursery
from skep.sandbox.twin.inside.desk import Desk
from skep.sandbox.twin.inside.family import Family
from skep.sandbox.twin.inside.loop import READ, Loop, Outbox
from skep.sandbox.twin.inside.paths import Root

_SUBREAPER, _DIE_WITH_PARENT = 36, 1
_PIECE = 1 << 18


class Goodbye(Exception):
    """The conversation is over."""


def main() -> None:
    options = Options(sys.argv[1:])
    warnings.simplefilter("ignore")  # a fork while threads run is meant
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    family = Family(alone=options.alone)
    if options.guarded:
        _stand_guard(family)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every command takes a few; they get limits of their own
    hearing, speaking = _streams()
    loop = Loop()
    outbox = Outbox(loop, speaking, _armour if options.armour else bytes)
    nursery = Nursery(fenced=not options.bare)
    desk = Desk(loop, outbox, root=Root(os.fsencode(options.home)), nursery=nursery, family=family)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _leave)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(loop.waker, warn_on_full_buffer=False)
    loop.watch(hearing, READ, _ears(hearing, desk, armour=options.armour))
    loop.each_turn += [desk.reap, outbox.flush]
    if options.patience:
        _grow_impatient(loop, desk, options.patience)
    outbox.say(wire.READY, 0, wire.COUNTED.pack(wire.VERSION))
    try:
        while True:
            outbox.flush()
            loop.turn()
    except (Goodbye, BrokenPipeError):
        pass
    finally:
        family.end()
        os._exit(0)


class Options:
    """What the command line says; `argparse` would double the time it takes to start."""

    def __init__(self, words: list[str]) -> None:
        #: Where relative paths start from.
        self.home = "/workspace"
        #: Seconds of silence after which to end; 0 for ever.
        self.patience = 0.0
        #: Speak in lines of base64.
        self.armour = False
        #: Everything in this world belongs to the sandbox.
        self.alone = False
        #: Put no fence between commands and this program.
        self.bare = False
        #: Let another process clean up if this one is killed.
        self.guarded = False
        rest = iter(words)
        for word in rest:
            name = word[2:]
            if word in ("--armour", "--alone", "--bare", "--guarded"):
                setattr(self, name, True)
            elif word in ("--home", "--patience"):
                setattr(self, name, type(getattr(self, name))(next(rest)))
            else:
                sys.exit(f"twin: there is no option {word}")


def _stand_guard(family: Family) -> None:
    """Go on in a child. This process waits for its end, and ends what it leaves behind; and the other way round."""
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, int(signal.SIGTERM), 0, 0, 0)
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        return
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.wait()[0] != child:
        pass
    family.end()
    os._exit(0)


def _streams() -> tuple[int, int]:
    """Take standard input and output for the conversation, and keep them from commands and stray prints."""
    if os.isatty(0):
        tty.setraw(0, termios.TCSANOW)
    hearing, speaking = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2 if not os.isatty(2) else nothing, 1)
    os.close(nothing)
    os.set_blocking(hearing, False)
    return hearing, speaking


def _leave(*_: object) -> None:
    raise Goodbye


def _ears(fd: int, desk: Desk, *, armour: bool) -> Callable[[], None]:
    parser = wire.Parser(wire.ORDER_LIMIT)
    lines = bytearray()

    def opened(data: bytes) -> bytes:
        lines.extend(data)
        end = lines.rfind(b"\n") + 1
        whole = bytes(lines[:end])
        del lines[:end]
        return b"".join(binascii.a2b_base64(line) for line in whole.split())

    def hear() -> None:
        try:
            data = os.read(fd, _PIECE)
        except BlockingIOError:
            return
        if not data:
            raise Goodbye
        for order in parser.feed(opened(data) if armour else data):
            desk.carry_out(order)

    return hear


def _armour(frame: bytes) -> bytes:
    return binascii.b2a_base64(frame)


def _grow_impatient(loop: Loop, desk: Desk, patience_s: float) -> None:
    def look() -> None:
        if time.monotonic() - desk.heard_at > patience_s:
            raise Goodbye
        loop.later(patience_s / 4, look)

    look()
