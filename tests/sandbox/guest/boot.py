"""Boot the guest and print what the trials in it found, in JSON: python -m tests.sandbox.guest.boot [FOLDER FOR LOGS]

The guest is emulated (no KVM is needed, nor any right), has one processor and no network, and sees the host's files
read-only through 9p. It powers itself off at the end. A boot now and then hangs before anything of ours runs, so a
guest that has said nothing for a while is ended and another one started.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.sandbox.guest import initramfs
from tests.sandbox.guest.fetch import kernel_folder
from tests.sandbox.guest.report import END

#: How long a guest may take to its first word, and in all.
FIRST_WORD_S, WHOLE_S = 90, 300
ATTEMPTS = 3
MISSING = 3
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
#: One thread: another core is somebody else's. The clock is trusted, since checking it under emulation fails.
MACHINE = (
    "-accel tcg,thread=single -cpu max -smp 1 -m 1024 -nodefaults -no-user-config -display none -no-reboot -nic none"
)
APPEND = "console=ttyS0 panic=-1 quiet mitigations=off nokaslr tsc=reliable no_timer_check random.trust_cpu=on"


def main() -> int:
    qemu, kernel = shutil.which("qemu-system-x86_64"), kernel_folder()
    if qemu is None or kernel is None:
        lacking = "QEMU" if qemu is None else "kernel for the guest"
        print(f"there is no {lacking}; run: python -m tests.sandbox.guest.fetch", file=sys.stderr)
        return MISSING
    with tempfile.TemporaryDirectory(prefix="skep-guest-") as folder:
        logs = Path(sys.argv[1] if len(sys.argv) > 1 else folder)
        command = compose(qemu, kernel, logs)
        for attempt in range(1, ATTEMPTS + 1):
            if boot(command, logs):
                break
            print(f"attempt {attempt} hung; the console ended:\n{tail(logs)}", file=sys.stderr)
        said = (logs / "said").read_text().replace("\r", "")
        print(said, end="")
        if END in said:
            return 0
        print(f"the trials did not come to their end; the console ended:\n{tail(logs)}", file=sys.stderr)
    return 1


def compose(qemu: str, kernel: Path, logs: Path) -> list[str]:
    (logs / "initramfs").write_bytes(
        initramfs.build(kernel, scripts={"init": (HERE / "init").read_text(), "paths": paths()})
    )
    (image,) = kernel.glob("boot/vmlinuz-*")
    share = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
    ports = ["-serial", f"file:{logs}/console", "-serial", f"file:{logs}/said"]
    start = ["-kernel", str(image), "-initrd", f"{logs}/initramfs", "-append", APPEND]
    # A guest goes with us, however we end.
    return ["setpriv", "--pdeathsig", "KILL", qemu, *MACHINE.split(), *start, "-virtfs", share, *ports]


def paths() -> str:
    """Return shell lines that say what the guest is to see, and with what it runs the trials."""
    visible = dict.fromkeys(str(Path(path).resolve()) for path in (REPOSITORY, sys.prefix, sys.base_prefix))
    shown = [path for path in visible if path != "/usr"]
    return "".join(
        f"{name}={shlex.quote(value)}\n"
        for name, value in (("visible", " ".join(shown)), ("python", sys.executable), ("repository", str(REPOSITORY)))
    )


def boot(command: list[str], logs: Path) -> bool:
    """Run a guest until it powers itself off; False if it hung."""
    said = logs / "said"
    said.write_text("")
    started = time.monotonic()
    guest = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=logs)
    try:
        while guest.poll() is None:
            passed = time.monotonic() - started
            if passed > WHOLE_S or (passed > FIRST_WORD_S and not said.stat().st_size):
                return False
            time.sleep(0.1)
    finally:
        guest.kill()
        guest.wait()
    return True


def tail(logs: Path) -> str:
    console = logs / "console"
    return console.read_text(errors="replace")[-2000:] if console.exists() else "(nothing)"


if __name__ == "__main__":
    sys.exit(main())
