"""Chromium as a process inside a sandbox: found, started with a throw-away profile, ended and cleared away."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from skep.errors import SandboxLost, SandboxUnusable
from skep.sandbox.sandbox import Exit, Process, Sandbox, Stream

#: The program itself: Debian's /usr/bin/chromium is a script that reads settings of the host.
_PROGRAMS = ("/usr/lib/chromium/chromium", "/usr/lib/chromium-browser/chromium-browser", "/usr/bin/chromium")
_LISTENING = re.compile(rb"DevTools listening on ws://127\.0\.0\.1:(\d{1,5})(/devtools/browser/[0-9a-f-]{1,64})\r?\n")
_KEPT = 8 << 10
_END_S = 5.0

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it needs namespaces, which are closed in here; the sandbox around it stays
    "--disable-gpu",
    "--disable-dev-shm-usage",  # /dev/shm is small, /tmp is not
    "--remote-debugging-port=0",
    "--window-size=1280,800",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-first-run",
    "--no-default-browser-check",
    "--password-store=basic",
    # Nothing goes out but what the pages ask for: all else would only fill the record of refusals.
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-client-side-phishing-detection",
    "--disable-component-extensions-with-background-pages",
    "--disable-component-update",
    "--component-updater=url-source=http://127.0.0.1:9",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-extensions",
    "--disable-field-trial-config",
    "--disable-quic",  # it is UDP, which does not go out: waiting for it to fail takes time
    "--disable-sync",
    "--metrics-recording-only",
    "--no-pings",
    "--disable-features=AutofillServerCommunication,CertificateTransparencyComponentUpdater,DialMediaRouteProvider,"
    "HttpsUpgrades,InterestFeedContentSuggestions,MediaRouter,NetworkTimeServiceQuerying,"
    "OptimizationGuideModelDownloading,OptimizationHints,PaintHolding,Translate",
    # Nobody looks at the window, and yet its pages are in use.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
)


class Chromium:
    """A running Chromium, and where inside it can be driven from."""

    def __init__(self, process: Process, port: int, path: str) -> None:
        self._process = process
        self.port = port
        self.path = path

    @property
    def ended(self) -> Exit | None:
        return self._process.exit

    @classmethod
    @asynccontextmanager
    async def start(cls, sandbox: Sandbox, *, timeout_s: float) -> AsyncIterator[Chromium]:
        """Start it for the length of a block; then end it and remove its profile."""
        profile = f"/tmp/chromium-{secrets.token_hex(8)}"
        # All that it and its libraries keep in a home or a cache goes with the profile.
        places = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")
        await sandbox.files.mkdir(profile)
        process = await sandbox.start(
            [_program(), *_FLAGS, f"--user-data-dir={profile}/profile", "about:blank"],
            env={**dict.fromkeys(places, profile), "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
        )
        draining: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(timeout_s):
                chromium = await cls._ready(process)
            # A full pipe would stop whoever writes to it.
            draining = [asyncio.create_task(_drain(stream)) for stream in (process.stderr, process.stdout)]
            yield chromium
        except TimeoutError as error:
            raise SandboxUnusable(
                f"Chromium did not start within {timeout_s:g} s", hint="allow more time, or give the sandbox more cpus"
            ) from error
        finally:
            for task in draining:
                task.cancel()
            with suppress(SandboxLost):
                await _clear(sandbox, process, profile)
            process.release()

    @classmethod
    async def _ready(cls, process: Process) -> Chromium:
        said = b""
        while (found := _LISTENING.search(said)) is None:
            piece = await process.stderr.read()
            if not piece:
                reason = said.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                raise SandboxUnusable(
                    f"Chromium did not start: {reason[0][:300]}", hint="give the sandbox more memory or processes"
                )
            said = (said + piece)[-_KEPT:]
        return cls(process, int(found[1]), found[2].decode())


def _program() -> str:
    for path in _PROGRAMS:
        if os.path.isfile(path):
            return path
    raise SandboxUnusable("Chromium is not installed", hint="apt-get install chromium")


async def _drain(stream: Stream) -> None:
    async for _ in stream:
        pass


async def _clear(sandbox: Sandbox, process: Process, profile: str) -> None:
    await process.kill()
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.wait()
    await sandbox.files.remove(profile, recursive=True)
