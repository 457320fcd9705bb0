"""The system call filter: what each rule answers, by an interpreter of its own and by the kernel."""

from __future__ import annotations

import errno
import json
import platform
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from skep.errors import SandboxUnusable
from skep.sandbox.seccomp import ARCHITECTURES, CLOSED, NEWEST_KNOWN, assemble

ALLOWED, KILLED = "allowed", "killed"
I386, ARM, X32 = 0x40000003, 0x40000028, 0x40000000
MACHINES = sorted(ARCHITECTURES)
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


def ruling(program: bytes, number: int, *arguments: int, audit: int = 0) -> str | int:
    """Run the filter as the kernel would: 'allowed', 'killed', or the error number it answers."""
    words = [value for argument in (*arguments, *(0,) * (6 - len(arguments))) for value in _halves(argument)]
    data = struct.pack("=IIQ", number & 0xFFFFFFFF, audit, 0) + struct.pack("=12I", *words)
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, at = 0, 0
    while True:
        operation, on_true, on_false, value = code[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x06:
                return _answer(value)
            case _:
                holds = {0x15: accumulator == value, 0x25: accumulator > value, 0x35: accumulator >= value}
                holds[0x45] = bool(accumulator & value)
                at += on_true if holds[operation] else on_false


def _halves(argument: int) -> tuple[int, int]:
    return argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF


def _answer(value: int) -> str | int:
    match value & 0xFFFF0000:
        case 0x7FFF0000:
            return ALLOWED
        case 0x80000000:
            return KILLED
        case 0x00050000:
            return value & 0xFFFF
        case _:
            raise AssertionError(f"an answer that this filter never gives: {value:#x}")


class Filter:
    """The filter of one machine type, asked by the names of calls."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.architecture = ARCHITECTURES[machine]
        self.program = assemble(machine)

    def number(self, call: str) -> int | None:
        if call in CLOSED:
            return CLOSED[call][self.architecture.column]
        return self.architecture.numbers.get(call)

    def __call__(self, call: str | int, *arguments: int) -> str | int:
        number = call if isinstance(call, int) else self.number(call)
        assert number is not None, call
        return ruling(self.program, number, *arguments, audit=self.architecture.audit)


@pytest.fixture(params=MACHINES)
def filtered(request: pytest.FixtureRequest) -> Filter:
    return Filter(request.param)


@pytest.mark.parametrize("call", sorted(CLOSED))
def test_a_closed_call_is_refused_whatever_its_arguments(filtered: Filter, call: str) -> None:
    if filtered.number(call) is None:
        assert filtered.machine == "aarch64"  # only x86-64 has calls that others never had
        return
    for arguments in ((), (0xFFFFFFFFFFFFFFFF,) * 6):
        assert filtered(call, *arguments) == errno.EPERM


def test_a_call_left_open_for_a_control_is_allowed_and_no_other(filtered: Filter) -> None:
    opened = assemble(filtered.machine, leave_open=["ptrace", "clone3"])
    numbers = {name: filtered.number(name) or 0 for name in ("ptrace", "clone3", "bpf")}
    answers = {name: ruling(opened, number, audit=filtered.architecture.audit) for name, number in numbers.items()}
    assert answers == {"ptrace": ALLOWED, "clone3": ALLOWED, "bpf": errno.EPERM}


def test_every_number_gets_an_answer_and_most_are_allowed(filtered: Filter) -> None:
    answers = [filtered(number) for number in range(NEWEST_KNOWN + 1)]
    judged = {filtered.number(call) for call in CLOSED} | {filtered.number(call) for call in ("clone3", "openat2")}
    for number, answer in enumerate(answers):
        if number not in judged and number not in filtered.architecture.numbers.values():
            assert answer == ALLOWED, number


@pytest.mark.parametrize("number", [NEWEST_KNOWN + 1, 500, 999, 0x3FFFFFFF])
def test_calls_newer_than_the_filter_do_not_exist(filtered: Filter, number: int) -> None:
    assert filtered(number) == errno.ENOSYS


@pytest.mark.parametrize("number", [0, 1, 59, 101, 512, 0x3FFFFFFF])
def test_numbers_of_x32_kill(filtered: Filter, number: int) -> None:
    assert filtered(X32 | number) == KILLED
    assert filtered(0x80000000 | number) == KILLED
    assert filtered(0xFFFFFFFF) == KILLED


@pytest.mark.parametrize("audit", [I386, ARM, 0, 0xFFFFFFFF, 0xC000003E, 0xC00000B7])
@pytest.mark.parametrize("number", [1, 11, 120])
def test_numbers_of_another_architecture_kill(filtered: Filter, audit: int, number: int) -> None:
    same = audit == filtered.architecture.audit
    assert ruling(filtered.program, number, audit=audit) == (filtered(number) if same else KILLED)


@pytest.mark.parametrize("bit", [0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000])
def test_no_namespace_is_made_by_clone(filtered: Filter, bit: int) -> None:
    assert filtered("clone", bit | signal.SIGCHLD) == errno.EPERM
    assert filtered("clone", bit | 0xFF << 32) == errno.EPERM


@pytest.mark.parametrize("flags", [signal.SIGCHLD, 0x3D0F00, 0x01200011, 0x4111])
def test_processes_and_threads_are_made_by_clone(filtered: Filter, flags: int) -> None:
    assert filtered("clone", flags) == ALLOWED


@pytest.mark.parametrize("call", ["clone3", "openat2"])
def test_calls_whose_arguments_cannot_be_seen_do_not_exist(filtered: Filter, call: str) -> None:
    assert filtered(call) == errno.ENOSYS


@pytest.mark.parametrize("bits", [0o4000, 0o2000, 0o6000, 0o4755])
def test_no_file_gets_setuid_or_setgid_bits(filtered: Filter, bits: int) -> None:
    for call, before in {"chmod": 1, "fchmod": 1, "fchmodat": 2, "creat": 1, "mknod": 1, "mknodat": 2}.items():
        if filtered.number(call) is not None:
            assert filtered(call, *(0,) * before, bits) == errno.EPERM, call
            assert filtered(call, *(0,) * before, 0o1777) == ALLOWED, call


def test_opening_judges_the_mode_only_where_one_is_meant(filtered: Filter) -> None:
    create, temporary, read = 0o100 | 0o1, 0o20200000 | 0o2, 0
    for call, before in {"open": 1, "openat": 2}.items():
        if filtered.number(call) is not None:
            for flags in (create, temporary):
                assert filtered(call, *(0,) * before, flags, 0o4755) == errno.EPERM
                assert filtered(call, *(0,) * before, flags, 0o755) == ALLOWED
            # Without a file to be made the register holds whatever was there.
            assert filtered(call, *(0,) * before, read, 0o7777) == ALLOWED


@pytest.mark.parametrize("request_", [0x5412, 0x541C, 0x541D, 0x5423])
def test_nothing_is_typed_into_a_terminal(filtered: Filter, request_: int) -> None:
    assert filtered("ioctl", 0, request_) == errno.EPERM
    assert filtered("ioctl", 0, request_ | 0xDEADBEEF << 32) == errno.EPERM  # the kernel looks at the low half alone


@pytest.mark.parametrize("request_", [0x5401, 0x5413, 0x5414, 0x541B, 0x5421])
def test_ordinary_terminal_calls_work(filtered: Filter, request_: int) -> None:
    assert filtered("ioctl", 0, request_) == ALLOWED


def test_a_program_may_ask_for_its_personality_and_not_change_it(filtered: Filter) -> None:
    assert filtered("personality", 0xFFFFFFFF) == ALLOWED
    assert filtered("personality", 0) == ALLOWED
    for persona in (0x0040000, 0x0008, 0x20000):
        assert filtered("personality", persona) == errno.EPERM


@pytest.mark.parametrize(
    ("family", "protocol", "answer"),
    [
        (1, 0, ALLOWED), (2, 6, ALLOWED), (10, 17, ALLOWED), (2, 0, ALLOWED), (16, 0, ALLOWED),
        (2, 132, errno.EPROTONOSUPPORT), (10, 33, errno.EPROTONOSUPPORT), (2, 255, errno.EPROTONOSUPPORT),
        (16, 9, errno.EAFNOSUPPORT), (16, 12, errno.EAFNOSUPPORT), (17, 0, errno.EAFNOSUPPORT),
        (38, 0, errno.EAFNOSUPPORT), (40, 0, errno.EAFNOSUPPORT), (29, 1, errno.EAFNOSUPPORT),
        (44, 0, errno.EAFNOSUPPORT), (0, 0, errno.EAFNOSUPPORT),
    ],
)  # fmt: skip
def test_only_plain_sockets_are_made(filtered: Filter, family: int, protocol: int, answer: str | int) -> None:
    assert filtered("socket", family, 1, protocol) == answer
    if answer != ALLOWED:
        assert filtered("socket", family | 1 << 32, 1, protocol | 1 << 32) == answer


def test_pairs_are_of_unix_sockets_alone(filtered: Filter) -> None:
    assert filtered("socketpair", 1) == ALLOWED
    assert filtered("socketpair", 30) == errno.EAFNOSUPPORT


def test_the_limits_of_the_agent_are_not_for_changing(filtered: Filter) -> None:
    assert filtered("prlimit64", 1) == errno.EPERM
    assert filtered("prlimit64", 0) == ALLOWED
    assert filtered("prlimit64", 2) == ALLOWED


def test_the_program_is_one_the_kernel_takes(filtered: Filter) -> None:
    assert len(filtered.program) % 8 == 0
    assert len(filtered.program) // 8 <= 4096


def test_a_processor_without_a_table_is_refused() -> None:
    with pytest.raises(SandboxUnusable, match="riscv64"):
        assemble("riscv64")


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.is_file():
        pytest.skip(f"no {header}: install the kernel's headers (linux-libc-dev) to compare")
    text = re.sub(r"__NR3264_(\w+)", r"__NR_\1", header.read_text())
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", text)}
    filtered = Filter(machine)
    ours = {name: filtered.number(name) for name in (*CLOSED, *filtered.architecture.numbers)}
    absent = {"memfd_secret", "nfsservctl", "lookup_dcookie"}  # left out of the generic table, or taken out since
    compared = {name: number for name, number in ours.items() if number is not None and name in known}
    assert compared == {name: known[name] for name in compared}
    assert {name for name, number in ours.items() if number is not None} - set(known) <= absent


#: Loads the filter into itself, makes the calls it is told, and prints the error of each.
CHILD = """
import ctypes, errno, json, sys
libc = ctypes.CDLL(None, use_errno=True)
program, calls = sys.stdin.read().split("\\n", 1)
data = bytes.fromhex(program)
code = ctypes.create_string_buffer(data, len(data))
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]
loaded = Program(len(data) // 8, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(loaded)) == 0
answers = []
for call in json.loads(calls):
    ctypes.set_errno(0)
    result = libc.syscall(*(ctypes.c_long(word) for word in call))
    answers.append(ctypes.get_errno() if result < 0 else 0)
    print(json.dumps(answers[-1]), flush=True)
"""


def _on_the_kernel(program: bytes, *calls: tuple[int, ...]) -> tuple[int, list[int]]:
    told = f"{program.hex()}\n{json.dumps(calls)}"
    ran = subprocess.run([sys.executable, "-c", CHILD], input=told, capture_output=True, text=True, timeout=30)
    assert ran.returncode <= 0, ran.stderr
    return ran.returncode, [int(line) for line in ran.stdout.split()]


here = pytest.mark.skipif(platform.machine() not in ARCHITECTURES, reason="this processor has no filter")


@here
def test_the_kernel_answers_as_the_interpreter_does() -> None:
    filtered = Filter(platform.machine())
    calls: list[tuple[int, ...]] = [
        (filtered.number(name) or 0, *(-1,) * 6) for name in CLOSED if filtered.number(name) is not None
    ]
    wanted = [filtered(*call) for call in calls]
    judged: list[tuple[str, tuple[int, ...]]] = [
        ("clone", (0x10000000,)), ("clone3", ()), ("openat2", ()), ("socket", (17, 3, 0)), ("socket", (16, 3, 9)),
        ("socket", (2, 1, 132)), ("socketpair", (2, 1, 0)), ("personality", (0x40000,)), ("ioctl", (0, 0x5412)),
        ("fchmod", (0, 0o4755)), ("prlimit64", (1, 7, 0, 0)),
    ]  # fmt: skip
    calls += [(filtered.number(name) or 0, *rest) for name, rest in judged]
    wanted += [filtered(name, *rest) for name, rest in judged]
    assert not {ALLOWED, KILLED} & set(map(str, wanted))
    assert _on_the_kernel(filtered.program, *calls) == (0, wanted)


@here
def test_the_kernel_lets_ordinary_calls_through() -> None:
    filtered = Filter(platform.machine())
    getpid, personality = {"x86_64": (39, 135), "aarch64": (172, 92)}[filtered.machine]
    assert _on_the_kernel(filtered.program, (getpid,), (personality, 0xFFFFFFFF)) == (0, [0, 0])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is a thing of x86-64")
def test_the_kernel_kills_for_a_number_of_x32() -> None:
    code, answers = _on_the_kernel(Filter("x86_64").program, (39,), (X32 | 39,), (39,))
    assert (code, answers) == (-signal.SIGSYS, [0])
