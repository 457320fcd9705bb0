"""Assemble the system call filter of a sandbox.

The filter is a classic BPF program as the kernel loads it, so no native library is needed. It closes what a
sandboxed command has no business with, answers `ENOSYS` to numbers newer than it knows (programs fall back), and
kills whoever speaks another architecture's numbers. Calls whose answer depends on the number alone are cached by
the kernel and cost nothing.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from skep.errors import SandboxUnusable

_LOAD, _JEQ, _JGE, _JGT, _JSET, _RET = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_X32_BIT = 0x40000000
#: The newest call this filter was written against; anything above is answered with ENOSYS.
NEWEST_KNOWN = 450

_SETID_BITS = 0o6000
_CREATES = 0o100 | 0o20000000  # O_CREAT, O_TMPFILE: only then is the mode argument meant
_NAMESPACE_FLAGS = 0x7E020000
_FORBIDDEN_TERMINAL_CALLS = (0x5412, 0x541C, 0x541D, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK, _NETLINK_ROUTE = 1, 2, 10, 16, 0
_PROTOCOLS = (0, 1, 6, 17, 58)  # the default, ICMP, TCP, UDP, ICMPv6: others load modules with a record of holes
_F_SETSIG, _SIGCONT = 10, 18

#: Closed for some values of one argument. Whoever may set the agent's limits (it is pid 1) can end the agent.
REFUSED_VALUES = {"ioctl": (1, _FORBIDDEN_TERMINAL_CALLS), "prlimit64": (0, (1,))}
#: Closed if one argument has any of these bits.
REFUSED_BITS = {
    "clone": (0, _NAMESPACE_FLAGS), "chmod": (1, _SETID_BITS), "fchmod": (1, _SETID_BITS), "creat": (1, _SETID_BITS),
    "mknod": (1, _SETID_BITS), "fchmodat": (2, _SETID_BITS), "mknodat": (2, _SETID_BITS),
}  # fmt: skip
#: Their arguments lie in memory, where a filter cannot look. Programs fall back on ENOSYS.
UNSEEN = ("clone3", "openat2")

#: Closed outright, by what they would open. Pairs are the numbers on x86-64 and on arm64 (None: not there).
CLOSED: dict[str, tuple[int | None, int | None]] = {
    # mounts, roots and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97),
    "setns": (308, 268), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # other processes' memory and files
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # kernel surface with a record of holes
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "memfd_secret": (447, 447), "move_pages": (279, 239), "migrate_pages": (256, 238), "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None), "uselib": (134, None), "ustat": (136, None), "sysfs": (139, None),
    "vhangup": (153, 58), "_sysctl": (156, None), "nfsservctl": (180, 42),
    # the machine itself
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "create_module": (174, None),
    "query_module": (178, None), "get_kernel_syms": (177, None), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "iopl": (172, None), "ioperm": (173, None), "syslog": (103, 116), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161),
    "setdomainname": (171, 162),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """One processor's audit word, its column in the tables, and the numbers of calls judged by their arguments."""

    audit: int
    column: int
    numbers: dict[str, int]


ARCHITECTURES = {
    "x86_64": Architecture(
        0xC000003E,
        0,
        {
            "clone": 56, "clone3": 435, "openat2": 437, "personality": 135, "socket": 41, "socketpair": 53,
            "prlimit64": 302, "ioctl": 16, "fcntl": 72,
            "chmod": 90, "fchmod": 91, "fchmodat": 268, "open": 2, "openat": 257, "creat": 85, "mknod": 133,
            "mknodat": 259,
        },
    ),
    "aarch64": Architecture(
        0xC00000B7,
        1,
        {
            "clone": 220, "clone3": 435, "openat2": 437, "personality": 92, "socket": 198, "socketpair": 199,
            "prlimit64": 261, "ioctl": 29, "fcntl": 25,
            "fchmod": 52, "fchmodat": 53, "openat": 56, "mknodat": 33,
        },
    ),
}  # fmt: skip

Instruction = tuple[int, int, int, int]


def assemble(machine: str | None = None, *, leave_open: Sequence[str] = ()) -> bytes:
    """Return the filter for a machine type, by default this one.

    `leave_open` names calls that stay unfiltered; only the attack tests' controls use it.
    """
    name = machine or platform.machine()
    if name not in ARCHITECTURES:
        raise SandboxUnusable(
            f"Skep has no system call filter for {name!r} processors",
            hint=f"run on one of {', '.join(ARCHITECTURES)}, or choose another sandbox mechanism",
        )
    architecture = ARCHITECTURES[name]
    program = _gate(architecture)
    for call, numbers in CLOSED.items():
        number = numbers[architecture.column]
        if number is not None and call not in leave_open:
            program += [(_JEQ, 0, 1, number), _fail(errno.EPERM)]
    for call, number in architecture.numbers.items():
        if call not in leave_open:
            body = _judgement(call)
            program += [(_JEQ, 0, len(body), number), *body]
    program.append((_RET, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _gate(architecture: Architecture) -> list[Instruction]:
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JEQ, 1, 0, architecture.audit),
        (_RET, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_JGE, 0, 1, _X32_BIT),
        (_RET, 0, 0, _KILL_PROCESS),
        (_JGT, 0, 1, NEWEST_KNOWN),
        _fail(errno.ENOSYS),
    ]


def _judgement(call: str) -> list[Instruction]:
    """Return the instructions that decide one call by its arguments; every path through them returns."""
    match call:
        case _ if call in UNSEEN:
            return [_fail(errno.ENOSYS)]
        case _ if call in REFUSED_BITS:
            return _refuse_bits(*REFUSED_BITS[call])
        case _ if call in REFUSED_VALUES:
            return _refuse_values(*REFUSED_VALUES[call])
        case "open":
            return _refuse_bits_when(2, _SETID_BITS, flags=1, present=_CREATES)
        case "openat":
            return _refuse_bits_when(3, _SETID_BITS, flags=2, present=_CREATES)
        case "fcntl":
            # A file that changes would send the signal by which a halted process goes on.
            return [_load(1), (_JEQ, 1, 0, _F_SETSIG), (_RET, 0, 0, _ALLOW), *_refuse_values(2, (_SIGCONT,))]
        case "personality":
            return _allow_values(0, (0, 0xFFFFFFFF), otherwise=errno.EPERM)
        case "socket":
            return _judge_socket()
        case "socketpair":
            return _allow_values(0, (_AF_UNIX,), otherwise=errno.EAFNOSUPPORT)
        case _:
            raise KeyError(call)


def _judge_socket() -> list[Instruction]:
    allow, refuse = (_RET, 0, 0, _ALLOW), _fail(errno.EAFNOSUPPORT)
    internet = [_load(2), *_any_of(_PROTOCOLS), _fail(errno.EPROTONOSUPPORT), allow]
    netlink = [_load(2), *_any_of((_NETLINK_ROUTE,)), refuse, allow]
    return [
        _load(0),
        (_JEQ, 0, 1, _AF_UNIX),
        allow,
        (_JEQ, 1, 0, _AF_INET),
        (_JEQ, 0, len(internet), _AF_INET6),
        *internet,
        (_JEQ, 0, len(netlink), _AF_NETLINK),
        *netlink,
        refuse,
    ]


def _refuse_bits(argument: int, bits: int) -> list[Instruction]:
    return [_load(argument), (_JSET, 0, 1, bits), _fail(errno.EPERM), (_RET, 0, 0, _ALLOW)]


def _refuse_bits_when(argument: int, bits: int, *, flags: int, present: int) -> list[Instruction]:
    return [
        _load(flags),
        (_JSET, 0, 3, present),
        _load(argument),
        (_JSET, 0, 1, bits),
        _fail(errno.EPERM),
        (_RET, 0, 0, _ALLOW),
    ]


def _refuse_values(argument: int, values: Sequence[int]) -> list[Instruction]:
    return [_load(argument), *_any_of(values), (_RET, 0, 0, _ALLOW), _fail(errno.EPERM)]


def _allow_values(argument: int, values: Sequence[int], *, otherwise: int) -> list[Instruction]:
    return [_load(argument), *_any_of(values), _fail(otherwise), (_RET, 0, 0, _ALLOW)]


def _any_of(values: Sequence[int]) -> list[Instruction]:
    """Skip the instruction that follows if the loaded word is one of these."""
    return [(_JEQ, len(values) - i, 0, value) for i, value in enumerate(values)]


def _load(argument: int) -> Instruction:
    """Load the low half of a 64-bit argument; both architectures here are little-endian."""
    return (_LOAD, 0, 0, 16 + 8 * argument)


def _fail(code: int) -> Instruction:
    return (_RET, 0, 0, 0x00050000 | code)
