"""Whether the server lives, and whether it can work."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from pydantic import BaseModel

from skep.errors import SkepError
from skep.gateway.door import AtDoor, Check
from skep.gateway.refusal import Mask

router = APIRouter(tags=["health"])
PATIENCE_S = 5.0


class Health(BaseModel):
    """The server answers."""

    status: str = "ok"


class Readiness(BaseModel):
    """Whether each thing that work needs is well: "ok", or what is wrong with it."""

    ready: bool
    checks: dict[str, str]


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", summary="Say that the server lives")
async def healthz() -> Health:
    return Health()


@router.get("/readyz", summary="Say whether the server can work", responses={503: {"model": Readiness}})
async def readyz(door: AtDoor, response: Response) -> Readiness:
    """Look at the database, at the worker that carries tasks, and at the sessions in which it works."""
    found = {name: await _verdict(check, door.mask) for name, check in door.checks.items()}
    ready = not door.closing.is_set() and all(verdict == "ok" for verdict in found.values())
    response.status_code = 200 if ready else 503
    return Readiness(ready=ready, checks=found)


async def _verdict(check: Check, mask: Mask) -> str:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await check()
    except TimeoutError:
        return f"no answer within {PATIENCE_S:g} s"
    except SkepError as error:
        return mask(error.message)
    return "ok"
