"""skep serve: the HTTP door, and an engine that carries tasks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.desk import settle, tell
from skep.cli.terminal import AsJson, examples, print_json, print_line

if TYPE_CHECKING:
    from skep.app.presence import Server
    from skep.config import Settings

EPILOG = examples(
    "skep serve  # at 127.0.0.1:7411 unless the settings say otherwise",
    "skep serve --port 0  # at a port that is free",
)


def serve(
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen at, instead of gateway.host.", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65_535, help="Port, instead of gateway.port.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take prompts over HTTP and carry them to replies until Ctrl-C.

    Other commands of this home go through the server while it runs, so that what they start outlives them.
    """
    import sys

    environment, settings = settle()
    wanted = _with(settings, host, port)

    def began(server: Server) -> None:
        token = environment.paths.home / "keys" / "gateway.token"
        if as_json:
            print_json({"address": server.address, "pid": server.pid, "token_file": str(token)})
        else:
            print_line(f"Skep serves at {server.address}; the token is in {token}")
            print_line("Ctrl-C ends it")
        sys.stdout.flush()

    from skep.app.service import is_public
    from skep.app.service import serve as serve_home

    if is_public(wanted.gateway.host):
        tell(f"{wanted.gateway.host} lets others in, without TLS: put a proxy with TLS before it")
    asyncio.run(serve_home(environment, wanted, tell=tell, began=began))


def _with(settings: Settings, host: str | None, port: int | None) -> Settings:
    from skep.config.settings import GatewaySettings

    given = {"host": host, "port": port}
    named = {name: value for name, value in given.items() if value is not None}
    gateway = GatewaySettings.model_validate({**settings.gateway.model_dump(), **named})
    return settings.model_copy(update={"gateway": gateway})
