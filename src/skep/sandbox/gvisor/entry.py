"""The first steps inside gVisor: turn the lone user of the sandbox into `agent`, then run the twin.

runsc without privilege knows one user, its own, and calls it root. In a user namespace of gVisor's own kernel the same
user has another number; capabilities, which gVisor gave none of, are dropped from that namespace too.

It imports nothing of Skep: it runs inside, with whatever Python there is.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys

_NEW_USER = 0x10000000
_CAPABILITIES_V3 = 0x20080522


def main() -> None:
    number, program, *arguments = sys.argv[1:]
    held = {"uid_map": os.geteuid(), "gid_map": os.getegid()}
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_USER) != 0:
        sys.exit(f"no user namespace: {os.strerror(ctypes.get_errno())}")
    for name, outside in held.items():
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, f"{number} {outside} 1".encode())
        os.close(fd)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, none) != 0:
        sys.exit(f"capabilities stay: {os.strerror(ctypes.get_errno())}")
    # What commands say to it ends here: the host keeps standard error in memory, for what goes wrong until now.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
