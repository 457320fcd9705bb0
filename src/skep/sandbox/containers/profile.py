"""The system call filter as an engine takes it: the rules of `seccomp.py` that its format can say.

The agent then takes the exact filter on itself, so this one is for whatever else the engine might start in there.
"""

from __future__ import annotations

import errno
import json
from functools import cache

from skep.sandbox import seccomp

_WORD = 0xFFFFFFFF


@cache
def profile() -> str:
    """Return the profile for `security_opt`."""
    rules = [_refused(list(seccomp.CLOSED), errno.EPERM), _refused(list(seccomp.UNSEEN), errno.ENOSYS)]
    for call, (argument, bits) in seccomp.REFUSED_BITS.items():
        rules += [_refused([call], errno.EPERM, _masked(argument, bit, bit)) for bit in _each(bits)]
    for call, (argument, values) in seccomp.REFUSED_VALUES.items():
        # Only the low half counts, as the kernel reads it: what is in the other half must not make a value another.
        rules += [_refused([call], errno.EPERM, _masked(argument, _WORD, value)) for value in values]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})


def _refused(names: list[str], code: int, *when: dict[str, object]) -> dict[str, object]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": code, "args": list(when)}


def _masked(argument: int, mask: int, value: int) -> dict[str, object]:
    return {"index": argument, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _each(bits: int) -> list[int]:
    return [1 << number for number in range(32) if bits >> number & 1]
