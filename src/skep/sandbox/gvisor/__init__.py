"""gVisor: a kernel of its own in user space, which answers the system calls of what runs inside.

Stand-alone, `runsc` runs a bundle without privilege, for root as for an ordinary user. With the option `engine`, a
Docker engine that knows runsc as a runtime does. Either way the twin is the first process, and serves the contract.

    mechanism.py   chooses between the two, and refuses what neither has
    house.py       runsc of our own: its processes, folder and limits     launch.py   becomes runsc, on the host
    engine.py      a container of an engine's
    bundle.py      the root that both show, with config.py                entry.py    the first steps inside

What Debian's build of 2022 does not do is listed in docs/guides/mechanisms.md.
"""

from skep.sandbox.gvisor.mechanism import start

__all__ = ["start"]
