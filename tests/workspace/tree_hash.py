"""One hash over all that a workspace shows, taken from inside: names, kinds, modes, links and contents."""

from __future__ import annotations

from skep.sandbox.sandbox import Sandbox

_PROGRAM = r"""
import hashlib, os, stat, sys
digest = hashlib.sha256(str(os.stat("/workspace").st_mode).encode())
for folder, folders, files in os.walk("/workspace"):
    folders.sort()
    for name in sorted(folders + files):
        path = os.path.join(folder, name)
        found = os.lstat(path)
        digest.update(f"{path}\0{found.st_mode}\0".encode(errors="surrogateescape"))
        if stat.S_ISLNK(found.st_mode):
            digest.update(os.readlink(path).encode())
        elif stat.S_ISREG(found.st_mode):
            digest.update(open(path, "rb").read())
print(digest.hexdigest())
"""


async def tree_hash(sandbox: Sandbox) -> str:
    ran = await sandbox.run(["/usr/bin/python3", "-I", "-S", "-c", _PROGRAM])
    assert ran.ok, ran.error_text
    return ran.text.strip()
