"""Ask the server of this home to have a computer up, so that what a command leaves in it outlives the command."""

from __future__ import annotations

import http.client
import json
from urllib.parse import quote, urlsplit

import structlog

from skep.app import presence
from skep.config import Environment, Settings
from skep.gateway.tokens import Tokens

#: A workspace that has to be made first, or brought back from an archive, takes its time.
_PATIENCE_S = 120.0


def wake(environment: Environment, settings: Settings, hive: str, account_id: str, *, thread: str, actor: str) -> None:
    """Have the server bring the computer of a thread up, if there is a server and it can.

    It is only a favour: without it the command finds the computer itself, or what is wrong with it.
    """
    server = presence.find(environment.paths, settings)
    if server is None:
        return
    where = urlsplit(server.address)
    headers = Tokens(environment.paths.home / "keys").headers(account_id, actor)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_PATIENCE_S)
    try:
        path = f"/api/hives/{quote(hive, safe='')}/computer"
        connection.request(
            "POST", path, json.dumps({"thread": thread}), {**headers, "Content-Type": "application/json"}
        )
        answer = str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        answer = type(error).__name__
    finally:
        connection.close()
    structlog.get_logger("skep.app").debug("asked_server", hive=hive, answer=answer)
