"""How a request is refused: the status of an error, and what to do about it, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from skep import errors
from skep.errors import Defect, Denied, InvalidRequest, NotFound, SkepError

Mask = Callable[[str], str]


class NoToken(Denied):
    """Nobody the server knows is asking."""

    status = 401


class TooLarge(InvalidRequest):
    """The body is larger than any that the server takes."""

    status = 413


class TooSlow(InvalidRequest):
    """The body did not come in time."""

    status = 408


class NoSuchMethod(InvalidRequest):
    """The path is there, and does not take this method."""

    status = 405


def answer(error: SkepError, mask: Mask = str) -> Response:
    """Say what is wrong; a client finds the error's class by its name, see docs/reference/errors.md."""
    hint = None if error.hint is None else mask(error.hint)
    body = {"error": public_name(error), "message": mask(error.message), "hint": hint}
    headers = {"Cache-Control": "no-store"}
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="skep"'
    if error.status in (408, 413):  # what is left of the body is nobody's
        headers["Connection"] = "close"
    text = json.dumps(body, ensure_ascii=False).encode(errors="backslashreplace")
    return Response(text, status_code=error.status, headers=headers, media_type="application/json")


def public_name(error: SkepError) -> str:
    """Return the name of the error, or of the one it is a case of, that the error tree has."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


def of_http(error: HTTPException, request: Request) -> SkepError:
    """Turn what the router says into an error of ours."""
    if error.status_code == 405:
        return NoSuchMethod(f"{request.method[:20]} is not for this path", hint="GET /api/openapi.json says what is")
    if error.status_code == 404:
        return NotFound("there is nothing at this path", hint="GET /api/openapi.json lists what there is")
    return InvalidRequest(str(error.detail)[:200], hint="GET /api/openapi.json says what a request looks like")


def of_crash(error: Exception, request: Request) -> SkepError:
    """Write down that it happened, and tell the caller no more; the server itself logs the traceback."""
    structlog.get_logger("skep.gateway").error("request_failed", path=request.url.path, error=type(error).__name__)
    return Defect("Skep failed in a way it should not", hint="the server's log says more")
