"""What the routes work with, and who is at the door."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, cast

import structlog
from fastapi import Depends, Header, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from skep.errors import Denied, InvalidRequest
from skep.gateway.refusal import Mask, NoToken
from skep.gateway.tokens import ACCOUNT, ACTOR, Tokens, Unreadable
from skep.sessions.sessions import Sessions
from skep.state.hives import Hives
from skep.state.names import check_name
from skep.tasks.tasks import Tasks

Check = Callable[[], Awaitable[None]]
_ACTOR = re.compile(r"cli:[A-Za-z0-9-]{1,100}")


@dataclass(frozen=True, slots=True)
class Door:
    """What the routes work with. A check raises when what it looks at is not well."""

    tasks: Tasks
    hives: Hives
    sessions: Sessions
    tokens: Tokens
    checks: Mapping[str, Check] = field(default_factory=dict)
    #: Raises when no prompt can be taken, such as for want of a model.
    accept: Callable[[], object] = bool
    mask: Mask = str
    #: Set when the server is about to end: those who wait are sent away.
    closing: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the account that the token opens, and the name under which it goes on record."""

    account_id: str
    actor: str


_BEARER = HTTPBearer(
    auto_error=False, scheme_name="token", description="The token of an account: skep account token ID."
)


def _door(request: Request) -> Door:
    return cast(Door, request.app.state.door)


async def _caller(
    door: Annotated[Door, Depends(_door)],
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
    account: Annotated[str | None, Header(alias=ACCOUNT, include_in_schema=False)] = None,
    actor: Annotated[str | None, Header(alias=ACTOR, include_in_schema=False)] = None,
) -> Caller:
    token = "" if bearer is None else bearer.credentials
    try:
        if account is not None or actor is not None:
            return _local_caller(door, token, account or "", actor or "")
        account_id = door.tokens.account_of(token)
    except Unreadable as error:  # which file it is, and what is wrong with it, is not for whoever asks
        structlog.get_logger("skep.gateway").error("token_unreadable", error=error.message, hint=error.hint)
        account_id = None
    if account_id is None:
        raise NoToken("the token is missing or opens nothing", hint="send the header Authorization: Bearer TOKEN")
    return Caller(account_id, f"api:{account_id}")


def _local_caller(door: Door, token: str, account: str, actor: str) -> Caller:
    """Believe a command of this home about who typed it; see `skep.gateway.tokens` for why nobody else is believed."""
    if not door.tokens.is_local(token):
        raise Denied("only a command of this home may say who asks", hint=f"leave out {ACCOUNT} and {ACTOR}")
    if _ACTOR.fullmatch(actor) is None:
        raise InvalidRequest(f"{ACTOR} is not cli: and the name of a user")
    return Caller(check_name("account id", account), actor)


AtDoor = Annotated[Door, Depends(_door)]
FromCaller = Annotated[Caller, Depends(_caller)]
