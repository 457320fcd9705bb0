"""The trials under systemd, as it is on a distribution: sessions, services and a user's own manager.

`under_systemd.py prepare` writes units that let process 1 start nothing but what the trials need; one of those units
runs `under_systemd.py trials`, and its end powers the guest off.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.sandbox.guest.report import TRIAL_S, USER, say, say_end, say_printed

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = ("env", f"PYTHONPATH={REPOSITORY}:{REPOSITORY}/src", sys.executable, "-B", "-m")
UNITS = Path("/etc/systemd/system")
VENDOR = Path("/usr/lib/systemd/system")
NEEDED = ("dbus.socket", "dbus.service")
#: A shell around the trial: in a session there is always one.
SHELL = ("sh", "-c", '"$@"; exit $?', "sh")
TARGET = "[Unit]\nRequires=skep.service\n"
SERVICE = """\
[Unit]
Requires=dbus.socket
After=dbus.socket
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ExecStart={python} tests.sandbox.guest.under_systemd trials
StandardOutput=tty
StandardError=tty
TTYPath=/dev/console
"""
#: As the vendor's, without asking logind for sizes.
RUNTIME_FOLDER = """\
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=install -d -m 700 -o %i -g %i /run/user/%i
"""
#: As the vendor's, without a login that asks for passwords and sessions.
USER_MANAGER = "[Service]\nPAMName=\nEnvironment=XDG_RUNTIME_DIR=/run/user/%i\n"


def prepare() -> None:
    wanted = [*VENDOR.glob("*.target.wants/*"), *UNITS.glob("*.target.wants/*"), *VENDOR.glob("graphical.target")]
    for name in {path.name for path in wanted} - set(NEEDED):
        mask = UNITS / name
        mask.unlink(missing_ok=True)
        mask.symlink_to("/dev/null")
    write("skep.target", TARGET)
    write("skep.service", SERVICE.format(python=" ".join(PYTHON)))
    write("user-runtime-dir@.service", RUNTIME_FOLDER)
    write("user@.service.d/skep.conf", USER_MANAGER)


def write(name: str, text: str) -> None:
    (UNITS / name).parent.mkdir(parents=True, exist_ok=True)
    (UNITS / name).write_text(text)


def trials() -> None:
    started = subprocess.run(["systemctl", "start", f"user@{USER}.service"], capture_output=True, text=True)
    say("systemd", {"version": first_line("systemctl", "--version"), "failed": started.stderr.strip()})
    user = (f"--uid={USER}", f"--gid={USER}")
    session = ("systemd-run", "--quiet", "--scope", f"--slice=user-{USER}.slice", "--unit=session-1", *user, *SHELL)
    run("session", "bomb", around=session)
    run("session of root", "where", around=["systemd-run", "--quiet", "--scope", "--unit=session-2", *SHELL])
    service = ("systemd-run", "--quiet", "--pipe", "--wait")
    run("delegated service", "where", around=[*service, *user, "--property=Delegate=yes"])
    run("service", "where", around=[*service, *user])
    run("service of root", "where", around=service)
    become = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    own = (*become, "env", f"XDG_RUNTIME_DIR=/run/user/{USER}", "systemd-run", "--user", "--quiet")
    run("user's scope", "where", around=[*own, "--scope", *SHELL])
    run("user's service", "where", around=[*own, "--pipe", "--wait"])
    run("user's delegated service", "where", around=[*own, "--pipe", "--wait", "--property=Delegate=yes"])
    subprocess.run(["systemctl", "stop", f"user@{USER}.service"], capture_output=True)
    run("session without a manager", "where", around=session)
    say_end()


def run(name: str, trial: str, *, around: Sequence[str]) -> None:
    """Run a trial as systemd starts it; `around` are the words before the command."""
    command = [*around, *PYTHON, "tests.sandbox.guest.trials", trial]
    try:
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRIAL_S)
    except subprocess.TimeoutExpired as error:
        say(name, {"error": f"no end within {TRIAL_S} s", "printed": str(error.stderr)[-2000:]})
    else:
        say_printed(name, ran.returncode, ran.stdout + ran.stderr if ran.returncode else ran.stdout)


def first_line(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout.partition("\n")[0]


if __name__ == "__main__":
    {"prepare": prepare, "trials": trials}[sys.argv[1]]()
