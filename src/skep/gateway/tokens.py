"""Bearer tokens, each in a file that its owner alone can read: one for each account, one for the home's own commands.

The token of an account opens what is the account's, and whoever brings it is known by the account alone. The local
token opens every account, and is believed about which user of this machine asks. That gives nothing away: whoever can
read it can read the tokens of all accounts beside it, and write the database itself. No command hands it out.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from skep.errors import Denied
from skep.state.names import check_name

MAIN = "default"
#: Headers with which a command of this home says for whom it asks; they need the local token.
ACCOUNT, ACTOR = "Skep-Account", "Skep-Actor"
# An underscore parts the words of a token, so it cannot be in one.
_TOKEN = re.compile(r"skep_([a-z0-9][a-z0-9-]{0,62})_([A-Za-z0-9-]{32,64})")
_LOCAL = re.compile(r"skep-local_[A-Za-z0-9-]{32,64}")


class Unreadable(Denied):
    """The file of a token is not as it should be."""


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
        return self._found_or_made(self.file(account_id), f"skep_{account_id}", _TOKEN)

    def local(self) -> str:
        """Return the token of the home's own commands, made now if there is none."""
        return self._found_or_made(self._folder / "local.token", "skep-local", _LOCAL)

    def headers(self, account_id: str, actor: str) -> dict[str, str]:
        """Return what a command of this home sends along to be let in for an account, as this user."""
        account = check_name("account id", account_id)
        return {"Authorization": f"Bearer {self.local()}", ACCOUNT: account, ACTOR: actor}

    def renew(self, account_id: str) -> str:
        """Give an account another token; the one it had opens nothing any more."""
        path = self.file(account_id)
        self._draft(f"skep_{account_id}").replace(path)
        return self.of(account_id)

    def account_of(self, token: str) -> str | None:
        """Return the account that a token opens, or None if it opens nothing."""
        found = _TOKEN.fullmatch(token)
        return found[1] if found and self._is(token, self.file(found[1]), _TOKEN) else None

    def is_local(self, token: str) -> bool:
        """Say whether this is the token of the home's own commands."""
        return _LOCAL.fullmatch(token) is not None and self._is(token, self._folder / "local.token", _LOCAL)

    def _is(self, token: str, path: Path, form: re.Pattern[str]) -> bool:
        try:
            return hmac.compare_digest(_read(path, form).encode(), token.encode())
        except FileNotFoundError:
            return False

    def _found_or_made(self, path: Path, words: str, form: re.Pattern[str]) -> str:
        with contextlib.suppress(FileNotFoundError):
            return _read(path, form)
        draft = self._draft(words)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # whoever comes second takes the first one's word
        draft.unlink()
        return _read(path, form)

    def _draft(self, words: str) -> Path:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._folder / f".token-{secrets.token_hex(8)}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(f"{words}_{secrets.token_urlsafe(32).replace('_', '-')}\n")
        return draft


def _read(path: Path, form: re.Pattern[str]) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError as error:
        raise Unreadable(f"{path} cannot be read", hint="work as the user who started Skep here") from error
    with open(fd) as file:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
            raise Unreadable(
                f"others can read {path}", hint=f"chmod 600 {path}, or remove it: the next start makes another"
            )
        token = file.read(256).strip()
    if form.fullmatch(token) is None:
        raise Unreadable(f"{path} holds no token", hint="remove it; the next start makes another")
    return token
