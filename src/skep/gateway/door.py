"""What the routes work with, and who is at the door."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from skep.gateway.refusal import Mask, NoToken
from skep.gateway.tokens import Tokens
from skep.sessions.sessions import Sessions
from skep.state.hives import Hives
from skep.tasks.tasks import Tasks

Check = Callable[[], Awaitable[None]]


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
    """Who asks, told by the token."""

    account_id: str

    @property
    def actor(self) -> str:
        return f"api:{self.account_id}"


_BEARER = HTTPBearer(
    auto_error=False, scheme_name="token", description="The token of an account: skep account token ID."
)


def _door(request: Request) -> Door:
    return cast(Door, request.app.state.door)


async def _caller(
    door: Annotated[Door, Depends(_door)],
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
) -> Caller:
    account_id = None if bearer is None else door.tokens.account_of(bearer.credentials)
    if account_id is None:
        raise NoToken("the token is missing or opens nothing", hint="send the header Authorization: Bearer TOKEN")
    return Caller(account_id)


AtDoor = Annotated[Door, Depends(_door)]
FromCaller = Annotated[Caller, Depends(_caller)]
