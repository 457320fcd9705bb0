"""What a command can ask of the kernel: namespaces, mounts, keys, sockets, terminals, modes of files."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import socket
from pathlib import Path

import pytest
from tests.attacks.attack import IS_ROOT, Attack, Plain, Weakened, each, numbers, outcome_in, program

from skep.sandbox.cgroups import Place
from skep.sandbox.sandbox import Sandbox

PLAIN = Plain()
#: A plain bwrap that keeps the capabilities of its own namespaces, as it does for root.
CAPABLE = Plain(("--uid", "0", "--gid", "0", "--cap-add", "ALL"))


def behind_filter(name: str, attempt: str, *calls: str) -> Attack:
    """Make an attack that only the filter holds."""
    return Attack(name, attempt, Weakened(leave_open=calls or (name.split(maxsplit=1)[0],)))


NAMESPACES = [
    Attack("a user namespace by unshare", "call('unshare', 0x10000000)", PLAIN),
    Attack("a user namespace by clone", "call('clone', 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)", PLAIN),
    Attack(
        "a user namespace by clone3",
        """
        wanted = struct.pack('=QQQQQQQQ', 0x10000000, 0, 0, 0, 17, 0, 0, 0)
        call('clone3', wanted, len(wanted)) or os._exit(0)
        """,
        PLAIN,
    ),
    Attack(
        "a mount in a nested namespace",
        "call('unshare', 0x10020000); call('mount', b'none', b'/tmp', b'tmpfs', 0, b'')",
        PLAIN,
    ),
    Attack("a mount", "call('mount', b'none', b'/tmp', b'tmpfs', 0, b'')", CAPABLE),
    Attack("a bind of /proc over another", "call('mount', b'/proc', b'/tmp', b'', 4096, b'')", CAPABLE),
    Attack("umount of /proc", "call('umount2', b'/proc', 2)", CAPABLE),
    Attack("chroot", "call('chroot', b'/usr')", CAPABLE),
    Attack("a new mount interface", "call('fsopen', b'tmpfs', 0)", CAPABLE),
    Attack("another host name", "call('sethostname', b'other', 5)", CAPABLE),
    behind_filter("setns", "reaches('setns', -1, 0)"),
    behind_filter("open_tree", "call('open_tree', -100, b'/', 0)"),
    behind_filter(
        "name_to_handle_at",
        "call('name_to_handle_at', -100, b'.', struct.pack('=Ii128x', 128, 0), ctypes.byref(ctypes.c_int()), 0)",
    ),
]

SURFACE = [
    behind_filter("io_uring_setup", "call('io_uring_setup', 4, bytes(120))"),
    behind_filter("userfaultfd", "call('userfaultfd', 1)"),
    behind_filter("bpf", "reaches('bpf', 0, 0, 1 << 20)"),
    behind_filter("perf_event_open", "reaches('perf_event_open', 0, 0, -1, -1, 0)"),
    behind_filter("add_key", "call('add_key', b'user', b'skep', b'secret', 6, -2)"),
    behind_filter("request_key", "reaches('request_key', b'user', b'skep-none', 0, 0)"),
    behind_filter("keyctl", "call('keyctl', 0, -3, 1)"),
    behind_filter("fanotify_init", "call('fanotify_init', 0x200, 0)"),
    behind_filter("move_pages", "reaches('move_pages', 0, 1, 1, 0, 0, 0)"),
    behind_filter("personality that ignores protections", "call('personality', 0x0400000)"),
    behind_filter("process_madvise", "reaches('process_madvise', -1, 0, 0, 0, 0)"),
    behind_filter("fcntl has the kernel wake a halted process", "fcntl.fcntl(0, 10, signal.SIGCONT)"),
    behind_filter("kcmp", "call('kcmp', os.getpid(), os.getpid(), 2, 0, 0)"),
    Attack(
        "the mount table by a call newer than the filter",
        "call('listmount', struct.pack('=IIQQ', 24, 0, 2**64 - 1, 0), bytes(8 * 64), 64, 0)",
        Weakened(leave_open=("*",)),
    ),
]

NEIGHBOURS = [
    behind_filter("ptrace of a neighbour", "call('ptrace', 16, forked(signal.pause), 0, 0)"),
    Attack("ptrace of pid 1", "call('ptrace', 0x4206, 1, 0, 0)", PLAIN),
    behind_filter(
        "process_vm_readv",
        """
        word = ctypes.create_string_buffer(b'secret')
        copy = ctypes.create_string_buffer(6)
        here = struct.pack('=QQ', ctypes.addressof(copy), 6)
        there = struct.pack('=QQ', ctypes.addressof(word), 6)
        call('process_vm_readv', forked(signal.pause), here, 1, there, 1, 0)
        assert copy.raw == b'secret'
        """,
    ),
    behind_filter("pidfd_getfd", "call('pidfd_getfd', os.pidfd_open(forked(signal.pause)), 0, 0)"),
]

SOCKETS = [
    behind_filter("AF_VSOCK, which reaches a hypervisor", "socket.socket(40, 1)", "socket"),
    behind_filter("AF_ALG", "socket.socket(38, 5)", "socket"),
    Attack("AF_PACKET", "socket.socket(17, 3)", CAPABLE),
    behind_filter("generic netlink", "socket.socket(16, 3, 16)", "socket"),
    behind_filter("netlink of kernel events", "socket.socket(16, 3, 15)", "socket"),
    behind_filter("UDP-Lite, as any odd protocol", "socket.socket(2, 2, 136)", "socket"),
    behind_filter(
        "a family loaded by socketpair", "reaches('socketpair', 40, 1, 0, bytes(8), refusal=errno.EAFNOSUPPORT)",
        "socketpair",
    ),
]  # fmt: skip

_ON_A_TERMINAL = """
import pty
os.setsid() if os.getpid() != os.getsid(0) else None
_, slave = pty.openpty()
fcntl.ioctl(slave, 0x540E, 0)
try:
    fcntl.ioctl(slave, {request}, b'x')
except OSError as error:
    if error.errno == errno.EPERM:
        raise
"""

TERMINALS = [
    behind_filter("TIOCSTI types into a terminal", _ON_A_TERMINAL.format(request="0x5412"), "ioctl"),
    behind_filter("TIOCLINUX pastes into a console", _ON_A_TERMINAL.format(request="0x541C"), "ioctl"),
    behind_filter("TIOCSETD loads a line discipline", _ON_A_TERMINAL.format(request="0x5423"), "ioctl"),
]

_SETS_A_BIT = """
open('f', 'w').close()
{how}
assert any(os.stat(name).st_mode & 0o6000 for name in os.listdir('.')), 'no bit was set'
"""

SETUID = [
    behind_filter(f"{call} sets {word}", _SETS_A_BIT.format(how=how), call)
    for call, word, how in (
        ("chmod", "setuid", "call('chmod', b'f', 0o4755)"),
        ("chmod", "setgid", "call('chmod', b'f', 0o2755)"),
        ("fchmod", "setuid", "call('fchmod', os.open('f', os.O_RDWR), 0o4755)"),
        ("fchmodat", "setuid", "call('fchmodat', -100, b'f', 0o4755)"),
        ("open", "setuid", "call('open', b'g', os.O_CREAT | os.O_WRONLY, 0o4755)"),
        ("openat", "setuid", "call('openat', -100, b'g', os.O_CREAT | os.O_WRONLY, 0o4755)"),
        ("creat", "setuid", "call('creat', b'g', 0o4755)"),
        ("mknod", "setuid", "call('mknod', b'g', 0o104755, 0)"),
        ("mknodat", "setuid", "call('mknodat', -100, b'g', 0o104755, 0)"),
    )
    if call in numbers()
]
SETUID += [
    behind_filter(
        "openat sets setuid on a file without a name",
        """
        fd = call('openat', -100, b'.', os.O_TMPFILE | os.O_RDWR, 0o4755)
        assert os.fstat(fd).st_mode & 0o4000
        """,
        "openat",
    ),
    Attack(
        "fchmodat2 sets setuid",
        _SETS_A_BIT.format(how="call('fchmodat2', -100, b'f', 0o4755, 0)"),
        Weakened(leave_open=("*",)),
    ),
]

_SAME_VALUE = """
with open({path!r}, 'r+') as file:
    value = file.read()
    file.seek(0)
    file.write(value)
"""
_ROOT_ONLY = "the files belong to root"

SYSTEM = [
    Attack(
        "core_pattern, which runs programs as root on the host",
        _SAME_VALUE.format(path="/proc/sys/kernel/core_pattern"), PLAIN, needs_root=_ROOT_ONLY,
    ),
    Attack(
        "swappiness, as any other setting in /proc/sys",
        _SAME_VALUE.format(path="/proc/sys/vm/swappiness"), PLAIN, needs_root=_ROOT_ONLY,
    ),
    Attack(
        "sysrq", "os.open('/proc/sysrq-trigger', os.O_WRONLY)", PLAIN,
        needs_root=_ROOT_ONLY, needs="/proc/sysrq-trigger",
    ),
    Attack("/etc/shadow", "assert os.path.exists('/etc/shadow')", PLAIN),
    Attack("/sys", "os.listdir('/sys')", Plain(("--ro-bind", "/sys", "/sys"))),
    Attack("the root of everything is writable", "os.mkdir('/planted')", PLAIN),
    Attack("/dev is writable", "os.mkdir('/dev/planted')", PLAIN),
]  # fmt: skip


@each([*NAMESPACES, *SURFACE, *NEIGHBOURS, *SOCKETS, *TERMINALS, *SETUID, *SYSTEM])
async def test_the_kernel_is_not_asked(attack: Attack, sandbox: Sandbox, tmp_path: Path) -> None:
    await attack.is_held(sandbox, tmp_path)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other numbers are those of x86")
@each([Attack("x32", "libc.syscall(0x40000000 + 39)", Weakened(leave_open=("*",)))])
async def test_numbers_of_x32_kill(attack: Attack, sandbox: Sandbox, tmp_path: Path) -> None:
    await attack.is_held(sandbox, tmp_path)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other numbers are those of x86")
async def test_numbers_of_i386_kill(sandbox: Sandbox, tmp_path: Path) -> None:
    """A call by `int 0x80` has other numbers, and a filter that only compares numbers is walked around."""
    text = program(
        """
        import mmap
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')  # getpid of i386
        address = ctypes.addressof(ctypes.c_char.from_buffer(code))
        assert ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid()
        """
    )
    try:
        control = await Weakened(leave_open=("*",)).outcome(text, tmp_path)
    except AssertionError:
        pytest.skip("this kernel does not run calls of i386 at all")
    assert control.through
    assert not (await outcome_in(sandbox, text)).through


async def test_a_read_only_folder_cannot_be_remounted_and_changed(outside: Path, tmp_path: Path) -> None:
    (outside / "file").write_text("before")
    (outside / "file").chmod(0o666)
    text = program(
        """
        call('mount', 0, b'/opt/shown', 0, 32 | 4096, 0)
        with open('/opt/shown/file', 'w') as file:
            file.write('after')
        """
    )
    control = await Plain((*CAPABLE.options, "--ro-bind", str(outside), "/opt/shown")).outcome(text, tmp_path)
    assert control.through
    assert (outside / "file").read_text() == "after"
    (outside / "file").write_text("before")
    async with Sandbox.create(read_only={str(outside): "/opt/shown"}) as sandbox:
        assert not (await outcome_in(sandbox, text)).through
    assert (outside / "file").read_text() == "before"


@pytest.mark.skipif(not IS_ROOT, reason="means something only as root: its groups belong to root")
async def test_a_sandbox_cannot_mount_its_group_and_raise_its_own_limit(sandbox: Sandbox, tmp_path: Path) -> None:
    place = Place.find()
    if place.way != "v1":
        pytest.skip("the control needs control groups of version 1")
    group = Path(place.parents["memory"], f"skep-attack-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
        text = program(
            f"""
            os.mkdir('/tmp/group')
            call('mount', b'cgroup', b'/tmp/group', b'cgroup', 0, b'memory')
            own = '/tmp/group{str(group).removeprefix("/sys/fs/cgroup/memory")}'
            with open((own if os.path.isdir(own) else '/tmp/group') + '/memory.limit_in_bytes', 'w') as file:
                file.write(str(512 << 20))
            """
        )
        (group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            control = await CAPABLE.outcome(text, tmp_path)
        finally:
            Path(place.parents["memory"], "cgroup.procs").write_text(str(os.getpid()))
        raised = (group / "memory.limit_in_bytes").read_text().strip() == str(512 << 20)
        assert control.through and raised, control.said
    finally:
        await removed(group)
    assert not (await outcome_in(sandbox, text)).through


async def removed(group: Path) -> None:
    """Remove a group as soon as what ran in it has gone for good."""
    async with asyncio.timeout(30):
        while True:
            try:
                group.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                await asyncio.sleep(0.01)
            else:
                return


async def test_a_key_of_the_host_cannot_be_read_by_its_number(sandbox: Sandbox, tmp_path: Path) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    numbered = numbers()
    serial = libc.syscall(numbered["add_key"], b"user", b"skep-attack", b"secret", 6, -2)
    assert serial > 0
    libc.syscall(numbered["keyctl"], 5, serial, 0x3F3F3F3F)  # KEYCTL_SETPERM: everybody
    text = program(
        """
        found = ctypes.create_string_buffer(6)
        call('keyctl', 11, serial, found, 6)
        assert found.raw == b'secret'
        """,
        serial=serial,
    )
    try:
        assert (await Weakened(leave_open=("keyctl",)).outcome(text, tmp_path)).through
        assert not (await outcome_in(sandbox, text)).through
    finally:
        libc.syscall(numbered["keyctl"], 3, serial)  # KEYCTL_REVOKE


@pytest.mark.parametrize("kind", ["loopback", "abstract"])
async def test_a_server_of_the_host_cannot_be_reached(kind: str, sandbox: Sandbox, tmp_path: Path) -> None:
    """Neither 127.0.0.1 nor an abstract socket inside is the host's."""
    if kind == "loopback":
        server, address = socket.socket(), ("127.0.0.1", 0)
    else:
        server, address = socket.socket(socket.AF_UNIX), f"\0skep-attack-{os.getpid()}"  # type: ignore[assignment]
    with server:
        server.bind(address)
        server.listen()
        text = program(
            "s = socket.socket(socket.AF_UNIX if isinstance(there, str) else socket.AF_INET); s.connect(there)",
            there=server.getsockname() if kind == "loopback" else address,
        )
        assert (await Plain(("--share-net",)).outcome(text, tmp_path)).through
        assert not (await outcome_in(sandbox, text)).through


async def test_a_fork_bomb_is_stopped_and_the_neighbour_goes_on() -> None:
    """A sandbox that forks without end reaches its own limit; another one answers meanwhile."""
    from skep.sandbox.limits import Limits

    text = program(
        """
        started = 0
        while started < 150:
            forked(signal.pause)
            started += 1
        """
    )
    async with Sandbox.create(limits=Limits(processes=400)) as roomy:
        assert (await outcome_in(roomy, text)).through
    bomb = "bomb() { bomb | bomb & }; bomb; sleep 30"
    async with Sandbox.create(limits=Limits(processes=64)) as held, Sandbox.create() as neighbour:
        assert not (await outcome_in(held, text)).through
        await held.kill_all()
        process = await held.start(bomb)
        for _ in range(5):
            answer = await asyncio.wait_for(neighbour.run("echo here"), 10)
            assert answer.text == "here\n"
        await process.kill()
        process.release()
