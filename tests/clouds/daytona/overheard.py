"""Listen to what a client of Daytona sends and does beside its work: `… overheard URL KEY FOLDER`.

It takes a process of its own, since the SDK alone changes the process that it is in.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import urlsplit

from skep.sandbox.sandbox import Sandbox

traces: list[str] = []
called: set[tuple[str, int]] = set()


class Collector(BaseHTTPRequestHandler):
    """Take traces as a collector of OpenTelemetry does."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        traces.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


async def through_skep(options: dict[str, Any]) -> None:
    async with Sandbox.create(mechanism="daytona", options=options) as sandbox:
        await sandbox.run("true")
        tell("skep")


async def alone(options: dict[str, Any]) -> None:
    from daytona import AsyncDaytona, DaytonaConfig

    client = AsyncDaytona(DaytonaConfig(**options))
    machine = await client.create()
    while client._event_dispatcher is None or not client._event_dispatcher.is_connected:
        await asyncio.sleep(0.02)
    await machine.delete()
    assert client._tracer_provider is not None
    await asyncio.to_thread(client._tracer_provider.force_flush)
    tell("sdk alone")
    await client.close()  # type: ignore[no-untyped-call] # the SDK says nothing of it


def tell(who: str) -> None:
    taken = asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    home = ("127.0.0.1", urlsplit(sys.argv[1]).port)
    print(f"{who}: called others {called != {home}}, traced {bool(traces)}, took over interrupts {taken}", flush=True)


def note(event: str, details: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(details[1], tuple):
        called.add(details[1][:2])


def main(url: str, key: str, folder: str) -> None:
    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    os.environ["DAYTONA_OTEL_ENABLED"] = "true"
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{collector.server_port}"
    os.chdir(folder)
    sys.addaudithook(note)
    options = {"api_key": key, "api_url": f"{url}/api", "target": "here"}
    for use in (through_skep, alone):
        asyncio.run(use(options))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
