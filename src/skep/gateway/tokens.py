"""Bearer tokens: each names its account and lies in a file that its owner alone can read."""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from skep.errors import Corrupt, Denied
from skep.state.names import check_name

MAIN = "default"
_TOKEN = re.compile(r"skep_([a-z0-9][a-z0-9-]{0,62})_([A-Za-z0-9-]{32,64})")


class Tokens:
    """The tokens of a home, one for each account that asked for one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def file(self, account_id: str) -> Path:
        """Say where the token of an account lies; nothing is made."""
        name = "gateway" if account_id == MAIN else f"gateway.{check_name('account id', account_id)}"
        return self._folder / f"{name}.token"

    def of(self, account_id: str) -> str:
        """Return the token of an account, made now if it has none."""
        path = self.file(account_id)
        with contextlib.suppress(FileNotFoundError):
            return self._read(path)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._draft(account_id)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # whoever comes second takes the first one's word
        draft.unlink()
        return self._read(path)

    def renew(self, account_id: str) -> str:
        """Give an account another token; the one it had opens nothing any more."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._draft(account_id).replace(self.file(account_id))
        return self.of(account_id)

    def account_of(self, token: str) -> str | None:
        """Return the account that a token opens, or None if it opens nothing."""
        found = _TOKEN.fullmatch(token)
        if found is None:
            return None
        try:
            known = self._read(self.file(found[1]))
        except FileNotFoundError:
            return None
        return found[1] if hmac.compare_digest(known.encode(), token.encode()) else None

    def _draft(self, account_id: str) -> Path:
        draft = self._folder / f".token-{secrets.token_hex(8)}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            # An underscore parts the words of a token, so it cannot be in one.
            file.write(f"skep_{account_id}_{secrets.token_urlsafe(32).replace('_', '-')}\n")
        return draft

    def _read(self, path: Path) -> str:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except PermissionError as error:
            raise Denied(f"{path} cannot be read", hint="work as the user who started Skep here") from error
        with open(fd) as file:
            if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
                raise Denied(f"others can read {path}", hint=f"chmod 600 {path}, or make another token")
            token = file.read(256).strip()
        if _TOKEN.fullmatch(token) is None:
            raise Corrupt(f"{path} holds no token", hint="remove it; the next start makes another")
        return token
