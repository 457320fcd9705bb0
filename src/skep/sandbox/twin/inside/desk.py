"""Carry out what the controller orders, and tell what became of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from skep.sandbox.twin.inside import wire
from skep.sandbox.twin.inside.birth import Nursery, Refused, Spawn
from skep.sandbox.twin.inside.family import Family
from skep.sandbox.twin.inside.files import Files
from skep.sandbox.twin.inside.loop import Loop, Outbox
from skep.sandbox.twin.inside.paths import NotUsable, Root
from skep.sandbox.twin.inside.program import Program
from skep.sandbox.twin.inside.transfer import Download, Upload, caught
from skep.sandbox.twin.inside.tunnel import Tunnel
from skep.sandbox.twin.inside.warden import Warden
from skep.sandbox.twin.inside.watch import Watch


class Desk:
    """Knows what is open by the id that the controller gave it."""

    def __init__(self, loop: Loop, outbox: Outbox, *, root: Root, nursery: Nursery, family: Family) -> None:
        self._loop = loop
        self._outbox = outbox
        self._files = Files(root)
        self._root = root
        self._nursery = nursery
        self._family = family
        self._open: dict[int, Any] = {}
        self._running: dict[int, Program] = {}
        self._paused = False
        self._warden: Warden | None = None
        self.heard_at = time.monotonic()
        self._orders: dict[int, Callable[[int, bytes], None]] = {
            wire.START: self._start,
            wire.INPUT: self._input,
            wire.INPUT_END: self._input_end,
            wire.CREDIT: self._credit,
            wire.SIGNAL: self._signal,
            wire.RESIZE: self._resize,
            wire.RELEASE: self._release,
            wire.PAUSE: self._pause,
            wire.RESUME: self._resume,
            wire.KILL_ALL: self._kill_all,
            wire.END_MARKED: self._end_marked,
            wire.COUNT: self._count,
            wire.FILE: self._file,
            wire.WATCH: self._watch,
            wire.CONNECT: self._connect,
            wire.PING: lambda number, _: outbox.say(wire.PONG, number),
            wire.LIMITS: self._limits,
        }
        outbox.relieved.append(self._relieve)

    def carry_out(self, order: wire.Frame) -> None:
        self.heard_at = time.monotonic()
        if order.kind not in self._orders:
            raise wire.Violation(f"an order of kind {order.kind}")
        self._orders[order.kind](order.id, order.payload)

    def reap(self) -> bool:
        """Learn who has ended."""
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            if dead is None or dead.si_pid == 0:
                return False
            program = self._running.pop(dead.si_pid, None)
            # Until it is reaped its number is nobody else's, so the rest of its group can be ended by it.
            if program is not None and program.doomed:
                program.signal(signal.SIGKILL, group=True)
            _, status, use = os.wait4(dead.si_pid, 0)
            if program is not None:
                code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
                killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                program.reaped(code, killed_by, (_micro(use.ru_utime), _micro(use.ru_stime), use.ru_maxrss))
                if program.released:
                    self._open.pop(program.number, None)

    def _relieve(self) -> None:
        for item in self._open.values():
            for source in getattr(item, "sources", {}).values():
                source.settle()
            if isinstance(item, Watch):
                item.settle()

    def _answer(self, number: int, result: Any) -> None:
        """Tell what came of an order: a value, or why it could not be."""
        if isinstance(result, OSError):
            self._outbox.say(wire.FAILED, number, _json({"errno": result.errno or 0}))
        elif isinstance(result, NotUsable):
            self._outbox.say(wire.FAILED, number, _json({"why": result.why, "detail": result.detail}))
        else:
            self._outbox.say(wire.DONE, number, _json(result))

    def _start(self, number: int, payload: bytes) -> None:
        input, rows, columns = wire.START_HEAD.unpack_from(payload)
        spawn = Spawn.read(payload[wire.START_HEAD.size :])
        program = Program(self._loop, self._outbox, number)
        try:
            program.start(self._nursery, self._at_home(spawn), input=input, size=(rows, columns))
        except Refused as refused:
            self._outbox.say(wire.REFUSED, number, refused.payload)
            return
        if (warden := self._warden) is not None:
            before = warden.tally()
            program.judge = lambda: warden.judge(before)
        program.begun = lambda: self._begun(program)
        self._open[number] = program
        self._running[program.pid] = program

    def _at_home(self, spawn: Spawn) -> Spawn:
        return spawn._replace(cwd=b"/" + self._root.inside(spawn.cwd) if spawn.cwd else b"/")

    def _begun(self, program: Program) -> None:
        if self._paused:
            program.signal(signal.SIGSTOP, group=False)

    def _input(self, number: int, payload: bytes) -> None:
        item = self._open.get(number)
        sink = item if isinstance(item, Upload) else getattr(item, "sink", None)
        if sink is not None:
            sink.put(payload)

    def _input_end(self, number: int, _: bytes) -> None:
        item = self._open.get(number)
        sink = item if isinstance(item, Upload) else getattr(item, "sink", None)
        if sink is not None:
            sink.end()

    def _credit(self, number: int, payload: bytes) -> None:
        stream, amount = wire.AMOUNT.unpack(payload)
        item = self._open.get(number)
        source = item if isinstance(item, Watch) else getattr(item, "sources", {}).get(stream)
        if source is not None:
            source.allow(amount)

    def _signal(self, number: int, payload: bytes) -> None:
        name, group, doom = wire.SIGNALLED.unpack(payload)
        program = self._open.get(number)
        if isinstance(program, Program) and program.pid in self._running:
            program.doomed = program.doomed or bool(doom)
            program.signal(name, group=bool(group))

    def _resize(self, number: int, payload: bytes) -> None:
        program = self._open.get(number)
        if isinstance(program, Program):
            program.resize(*wire.SIZE.unpack(payload))

    def _release(self, number: int, _: bytes) -> None:
        item = self._open.pop(number, None)
        if item is not None:
            item.release()
            if isinstance(item, Program) and item.pid in self._running:
                self._open[number] = item  # it may still be signalled

    def _pause(self, number: int, _: bytes) -> None:
        self._paused = True
        self._family.halt()
        self._answer(number, None)

    def _resume(self, number: int, _: bytes) -> None:
        self._paused = False
        self._family.go_on()
        self._answer(number, None)

    def _kill_all(self, number: int, _: bytes) -> None:
        self._family.end()
        self._answer(number, None)

    def _end_marked(self, number: int, payload: bytes) -> None:
        self._answer(number, self._family.end_marked(**json.loads(payload)))

    def _count(self, number: int, _: bytes) -> None:
        self._answer(number, len(self._family.living()))

    def _limits(self, number: int, payload: bytes) -> None:
        if self._warden is not None:
            raise wire.Violation("limits, twice")
        self._warden = Warden(self._loop, self._root, self._family, json.loads(payload))
        self._warden.busy = lambda: bool(self._running) and not self._paused
        self._warden.disk_full = self._disk_full
        self._warden.look()
        self._answer(number, None)

    def _disk_full(self) -> None:
        for program in self._running.values():
            program.limit = wire.DISK
        self._family.end()

    def _file(self, number: int, payload: bytes) -> None:
        asked = json.loads(payload)
        act = asked["act"]
        if act in ("read", "pack"):
            self._read(number, asked)
        elif act in ("write", "append", "plant"):
            self._write(number, asked)
        else:
            work = self._files.acts[act]
            self._loop.in_thread(lambda: caught(lambda: work(asked)), lambda done: self._answer_at_length(number, done))

    def _answer_at_length(self, number: int, result: Any) -> None:
        """Answer in pieces what may be too long for a frame, such as a list."""
        if isinstance(result, list):
            text = _json(result)
            for start in range(0, len(text), wire.PIECE):
                self._outbox.say(wire.DATA, number, wire.STREAM.pack(wire.BOTH) + text[start : start + wire.PIECE])
            result = None
        self._answer(number, result)

    def _read(self, number: int, asked: dict[str, Any]) -> None:
        download = self._open[number] = Download(self._loop, self._outbox, number)
        open_ = self._files.open_to_read if asked["act"] == "read" else self._files.open_to_pack

        def opened(result: Any) -> None:
            if isinstance(result, Exception):
                self._answer(number, result)
            else:
                download.opened(result, lambda value: self._answer(number, value))

        self._loop.in_thread(lambda: caught(lambda: open_(asked)), opened)

    def _write(self, number: int, asked: dict[str, Any]) -> None:
        upload = self._open[number] = Upload(self._loop, self._outbox, number, asked)
        upload.answer = lambda result: self._answer(number, result)
        files = self._files
        drafts: dict[str, Callable[[dict[str, Any]], Any]] = {
            "write": files.draft,
            "append": files.addition,
            "plant": files.planting,
        }
        draft = drafts[asked["act"]]

        def opened(result: Any) -> None:
            if isinstance(result, Exception):
                self._answer(number, result)
            else:
                upload.opened(result)

        self._loop.in_thread(lambda: caught(lambda: draft(asked)), opened)

    def _watch(self, number: int, payload: bytes) -> None:
        path = wire.name_in(json.loads(payload)["path"])

        def begun() -> Watch:
            folder = self._root.open(self._root.inside(path), os.O_RDONLY | os.O_DIRECTORY)
            watch = Watch(self._loop, self._outbox, number, self._root, folder)
            watch.begin()
            return watch

        def told(result: Any) -> None:
            self._answer(number, result if isinstance(result, Exception) else None)
            if isinstance(result, Watch) and number not in self._open:
                result.release()  # nobody wants it any more
            elif isinstance(result, Watch):
                self._open[number] = result
                result.settle()

        self._open[number] = None
        self._loop.in_thread(lambda: caught(begun), told)

    def _connect(self, number: int, payload: bytes) -> None:
        tunnel = self._open[number] = Tunnel(
            self._loop, self._outbox, number, answer=lambda result: self._answer(number, result)
        )
        tunnel.connect(wire.COUNTED.unpack(payload)[0])


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _micro(seconds: float) -> int:
    return int(seconds * 1_000_000)
