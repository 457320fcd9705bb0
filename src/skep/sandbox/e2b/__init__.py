"""E2B: a virtual machine in its cloud, reached through its SDK.

A machine is made with no way out and closed to visitors, root on it makes the user `agent`, and a twin is started
there behind a relay; from then on commands, files and connections go over that one stream, and E2B's own interface is
used only for the life of the machine: pausing, waking, and putting off the hour at which it stops by itself.

    mechanism.py   starts a sandbox, and refuses what E2B cannot keep
    machine.py     the calls that are made of the SDK, and what is made of their failures
    line.py        a relay's standard input and output, by E2B's processes
    network.py     a policy in the words of E2B's firewall

What E2B may be told with `options`:

- `template`: what the machine is made from (`base`); it needs bash and Python 3.9 or newer
- `timeout_s`: after how long without work it stops by itself (300)
- `keep`: stop by pausing the machine instead of ending it, so that it can be found again
- `sandbox_id`: use this machine, halted or not, instead of a new one; what another controller runs there is ended
- `find`: use the one machine that has the recipe's labels, instead of a new one
- `volumes`: E2B's own volumes, path inside to name; one that is not there is made
- `public`: let everybody reach the ports of the machine who knows its address
- `api_key`, `domain`, `api_url`, `sandbox_url`, `request_timeout_s`: how E2B is reached, if not as its SDK finds it
"""

from skep.sandbox.e2b.mechanism import E2BSandbox, forget, start, volumes

__all__ = ["E2BSandbox", "forget", "start", "volumes"]
