"""Who may speak to an exposed port: the rules on each request, and taking the token out of it.

A loopback port can be reached by every program and every user of the machine, and by every page in their browsers.
So each request has to carry the token, and one that carries it as a cookie has to come from a page of this very port:
a browser adds the cookie whoever asks, and calls every port of this machine the same site.
"""

from __future__ import annotations

import hmac
import html
import secrets
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from skep.sandbox.egress.http import Head, refusal

NAME = "skep_token"
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_HOW = (
    "This port leads into a Skep sandbox and needs its token:\n"
    "send the header `Authorization: Bearer TOKEN`, or open the exposure's link, which ends in ?skep_token=TOKEN."
)


class NotAdmitted(Exception):
    """The request does not go in; the message says what to do."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status

    def answer(self) -> bytes:
        return refusal(self.status, str(self))


@dataclass(frozen=True, slots=True)
class Welcome:
    """A visitor came with the link: a cookie takes the token's place, and the address is cleaned of it."""

    address: str
    cookie: str
    #: Come from another site, a browser would not send the new cookie after a redirect, but does from a page of ours.
    from_elsewhere: bool

    def answer(self) -> bytes:
        status, more = ("200 OK", "") if self.from_elsewhere else ("303 See Other", f"Location: {self.address}\r\n")
        page = f'<meta http-equiv="refresh" content="0;url={html.escape(self.address)}">\n'.encode()
        head = (
            f"HTTP/1.1 {status}\r\n{more}"
            f"Set-Cookie: {self.cookie}; Path=/; HttpOnly; SameSite=Strict\r\n"
            "Referrer-Policy: no-referrer\r\nCache-Control: no-store\r\nConnection: close\r\n"
            f"Content-Type: text/html; charset=utf-8\r\nContent-Length: {len(page)}\r\n\r\n"
        )
        return head.encode("latin-1") + page


class Token:
    """The token of one exposed port."""

    def __init__(self, port: int, text: str | None = None) -> None:
        self.text = text or secrets.token_urlsafe(32)
        self._port = port
        # Cookies do not know ports: without it in the name one exposure's cookie would take another's place.
        self._cookie = f"{NAME}_{port}"

    def admit(self, head: Head) -> Head | Welcome:
        """Return the request as it goes in, without the token; or raise `NotAdmitted`."""
        host, port = head.authority()
        if host.lower() not in _HOSTS or port != self._port:
            raise NotAdmitted("403", f"This is 127.0.0.1:{self._port}, and no other name leads here.")
        if head.method in ("CONNECT", "TRACE"):
            raise NotAdmitted("405", f"{head.method} is not passed on.")
        if head.values("service-worker"):
            # It would outlive the exposure and meet whoever gets the port next.
            raise NotAdmitted("403", "A page from a sandbox may not install a service worker.")
        path, given = _split_target(head.target)
        if not any(self._fits(text) for text in _bearers(head)):
            if any(self._fits(text) for text in given):
                if head.method in ("GET", "HEAD") and not head.upgrades:
                    return self._welcome(head, f"http://{host}:{port}{path}")
            elif any(self._fits(value) for name, value in _cookies(head) if name in (self._cookie, NAME)):
                _refuse_other_origins(head, f"http://{host}:{port}")
            else:
                raise NotAdmitted("401", _HOW)
        return self._without(replace(head, target=path))

    def _welcome(self, head: Head, address: str) -> Welcome:
        site = head.values("sec-fetch-site")
        return Welcome(address, f"{self._cookie}={self.text}", from_elsewhere=site not in ([], ["none"]))

    def _fits(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("latin-1"), self.text.encode())

    def _without(self, head: Head) -> Head:
        """Take the token out wherever it stands, and with it what is another exposure's."""
        if self.text in head.target:
            raise NotAdmitted("400", "The token belongs in the header or the query, not in the path.")
        fields = []
        for name, value in head.fields:
            if name.lower() == "cookie":
                kept = [piece for piece in value.split(";") if not piece.strip().startswith(NAME)]
                fields += [(name, ";".join(kept).strip())] if kept else []
            elif self.text not in value:
                fields.append((name, value))
        return replace(head, fields=tuple(fields))


def _refuse_other_origins(head: Head, own: str) -> None:
    origins, sites = head.values("origin"), head.values("sec-fetch-site")
    if any(origin.lower() != own.lower() for origin in origins) or any(
        site not in ("same-origin", "none") for site in sites
    ):
        raise NotAdmitted("403", f"A page of another origin asked. Only pages of {own} may; others send the header.")


def _split_target(target: str) -> tuple[str, list[str]]:
    """Return the path and query without tokens, and the tokens."""
    if not target.startswith(("/", "*")):
        parts = urlsplit(target)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    path, _, query = target.partition("?")
    pieces = [piece.partition("=") for piece in query.split("&")] if query else []
    kept = "&".join("".join(piece) for piece in pieces if piece[0] != NAME)
    return (f"{path}?{kept}" if kept else path), [piece[2] for piece in pieces if piece[0] == NAME]


def _bearers(head: Head) -> list[str]:
    words = [value.split() for value in head.values("authorization")]
    return [pair[1] for pair in words if len(pair) == 2 and pair[0].lower() == "bearer"]


def _cookies(head: Head) -> list[tuple[str, str]]:
    pairs = [piece.strip().partition("=") for value in head.values("cookie") for piece in value.split(";")]
    return [(name.strip(), text.strip()) for name, _, text in pairs]
