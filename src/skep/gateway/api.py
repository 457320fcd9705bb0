"""The HTTP door put together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from skep import __version__
from skep.errors import InvalidRequest, SkepError
from skep.gateway import health, routes
from skep.gateway.door import Door
from skep.gateway.gate import Bounds, Gate, called_by, from_here
from skep.gateway.refusal import answer, of_crash, of_http

SCHEMA_PATH = "/api/openapi.json"


def build(door: Door, *, names: Collection[str] = (), bounds: Bounds | None = None) -> Gate:
    """Return the application that a server runs; it answers to loopback names and to these."""
    return Gate(application(door), looks=(called_by(names), from_here), bounds=bounds)


def application(door: Door) -> FastAPI:
    """Return what is behind the gate."""
    app = _application()
    app.state.door = door
    return app


def openapi() -> dict[str, Any]:
    """Return the description of the door, without opening anything."""
    return _application().openapi()


def _application() -> FastAPI:
    app = FastAPI(
        title="Skep",
        version=__version__,
        description="Prompts in, events and replies out.",
        openapi_url=SCHEMA_PATH,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.include_router(routes.router)
    app.include_router(health.router)
    app.add_exception_handler(SkepError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(Exception, _refuse)
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    door = cast(Door, request.app.state.door)
    match error:
        case SkepError():
            known = error
        case RequestValidationError():
            known = _of_fault(error)
        case HTTPException():
            known = of_http(error, request)
        case _:
            known = of_crash(error, request)
    return answer(known, door.mask)


def _of_fault(error: RequestValidationError) -> InvalidRequest:
    """Name the first field that is wrong, and not what it held."""
    fault = error.errors()[0]
    if fault["type"] == "json_invalid" or fault["loc"] == ("body",):
        return InvalidRequest(
            "the body is no JSON object", hint="send Content-Type: application/json and a JSON object"
        )
    where = ".".join(ascii(part)[:60].strip("'") for part in fault["loc"])
    return InvalidRequest(f"{where}: {fault['msg'][:200]}", hint="GET /api/openapi.json says what a request looks like")
