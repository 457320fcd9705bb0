"""Sandboxes on machines of Daytona, through its own SDK (`pip install 'skep[daytona]'`).

Each sandbox is a machine. The twin runs on it as the user `agent`, whose home is /workspace. What cannot be kept there
is refused: a folder of this machine, layers, mounts, and an allow-list of hosts, since Daytona's own lists know neither
ports nor secrets.

    mechanism.py   what may be asked for; starts a sandbox
    service.py     every name of the SDK that is used, and every error of it
    house.py       a machine made ready, reached over a terminal, kept awake, put away
    porter.py      the other end of that terminal, on the machine
"""

from skep.sandbox.daytona.mechanism import DaytonaSandbox, forget, start, volumes

__all__ = ["DaytonaSandbox", "forget", "start", "volumes"]
