"""One connection out of a sandbox: find out whom it is for, rule on it, and carry it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from ipaddress import ip_address
from typing import TYPE_CHECKING

from skep.errors import InvalidRequest
from skep.sandbox.egress.dial import Unreachable, dial
from skep.sandbox.egress.dns import answer
from skep.sandbox.egress.exchange import Exchange
from skep.sandbox.egress.hello import HANDSHAKE, Incomplete, NotHello, server_name
from skep.sandbox.egress.http import Head, Malformed, parse_head, refusal, split_authority
from skep.sandbox.egress.placeholders import Mask
from skep.sandbox.egress.policy import DEFAULT_PORTS, DNS_PORT, PROXY_PORT, plain_host
from skep.sandbox.egress.sniff import is_http, may_connect, plain_address, tells
from skep.sandbox.egress.wire import SocketWire, StreamWire, Wire, peek, pump, readable, relay

if TYPE_CHECKING:
    from skep.sandbox.egress.outlet import Outlet

#: On ports that are neither the web's nor the proxy's a server may speak first.
_SILENCE_S = 0.3
_HANDSHAKE_S = 15.0
_GOODBYE_S = 2.0
_BUFFER_BYTES = 64 << 10
_CONNECT_LIMIT = 16 << 10


class Refused(Exception):
    """The policy does not allow it; the message is for whoever tried."""


class Connection:
    """A connection from its acceptance to its end."""

    def __init__(self, outlet: Outlet, client: socket.socket) -> None:
        self.outlet = outlet
        self._client = client
        self._wire = SocketWire(client)
        self._others: list[Wire] = []
        self._task: asyncio.Task[None] | None = None
        #: The client's socket belongs to a transport, which closes it when it has said its last.
        self._handed_over = False
        address, self._port = client.getsockname()[:2]
        self._address = plain_address(address)
        self._name = outlet.names.name(self._address)
        self._wanted: tuple[str, int] = (self._name or self._address, self._port)
        #: The host and port that it was allowed for.
        self.bound: tuple[str, int] | None = None
        #: The client, while a host is to answer it.
        self.awaited_by: Wire | None = None
        #: When it last carried anything, by the loop's clock.
        self.active_at = asyncio.get_running_loop().time()

    @property
    def head_s(self) -> float:
        """How long the client may take to say what it wants."""
        return self.outlet.policy.traffic.head_s

    async def serve(self) -> None:
        self._task = asyncio.current_task()
        try:
            self._client.setblocking(False)
            self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(self.outlet.policy.traffic.connection_s):
                await self._serve()
        except (OSError, TimeoutError, Malformed):
            pass  # either side went away, or time is up: closing says so
        except asyncio.CancelledError:
            for wire in self._others:
                wire.abort()
            raise
        finally:
            self.outlet.connections.discard(self)
            for wire in self._others:
                wire.close()
            if not self._handed_over:
                self._wire.close()

    def cut(self) -> None:
        """End the connection now."""
        if self._task is not None:
            self._task.cancel()

    async def _serve(self) -> None:
        if self._port == DNS_PORT:
            await self._answer_names()
        elif self._port == PROXY_PORT and ip_address(self._address).is_loopback:
            await self._serve_as_proxy()
        else:
            await self._serve_transparently()

    async def _answer_names(self) -> None:
        """Answer questions as over UDP, each with its length before it."""
        while len(size := await self._wire.exactly(2)) == 2:
            query = await self._wire.exactly(struct.unpack("!H", size)[0])
            reply = answer(query, self.outlet.names)
            if reply is None:
                return
            self.count(len(reply))
            await self._wire.write(struct.pack("!H", len(reply)) + reply)

    # Programs that know of a proxy ask it by name.

    async def _serve_as_proxy(self) -> None:
        async with asyncio.timeout(self.head_s):
            # Taken byte by byte as it were: what follows a CONNECT is not for us, and may be there already.
            first = await peek(self._client, lambda data: not may_connect(data) or b"\r\n\r\n" in data, _CONNECT_LIMIT)
        if not first:
            return
        if not may_connect(first):
            await self._serve_http(self._wire, explicit=True)
            return
        try:
            head, mark, _ = first.partition(b"\r\n\r\n")
            request = parse_head(head + mark) if mark else None
            if request is None or request.values("content-length") or request.values("transfer-encoding"):
                raise Malformed("this is not a CONNECT that can be passed on")
            self._client.recv(len(head + mark))
            host, port = split_authority(request.target)
            self._name, self._port = self._named(host), port or 443
            self.rule(self._name, self._port)
        except (Malformed, Refused) as problem:
            await self._refuse(self._wire, problem)
            return
        await self._wire.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await self._serve_transparently()

    # Everybody else just connects.

    async def _serve_transparently(self) -> None:
        is_web = self._port in DEFAULT_PORTS
        first = await self._first_bytes(self.head_s if is_web else _SILENCE_S)
        if not first and not is_web:
            await self._serve_the_silent()
        elif first[:1] == bytes([HANDSHAKE]):
            await self._serve_tls()
        elif first and (is_web or await self._speaks_http()):
            await self._serve_http(self._wire)
        elif first:
            await self._serve_raw()

    async def _first_bytes(self, patience_s: float) -> bytes:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                return await peek(self._client, lambda data: True)
        return b""

    async def _speaks_http(self) -> bool:
        """Tell HTTP from other protocols by the first line: whoever speaks it may not escape the rules on it."""
        async with asyncio.timeout(self.head_s):
            data = await peek(self._client, tells)
        return is_http(data)

    async def _serve_the_silent(self) -> None:
        """Connect for a client that waits; if the host stays silent too, find out what the client speaks after all."""
        try:
            host = self._named_here()
            self.rule(host, self._port)
            upstream = await self._dial(host, self._port)
        except (Refused, Unreachable) as problem:
            await self._refuse(self._wire, problem)
            return
        wire = self._keep(SocketWire(upstream))
        if await readable(self._client, upstream) is upstream:
            await self.join(self._wire, wire)
            return
        wire.close()
        first = await self._first_bytes(self.head_s)
        if first[:1] == bytes([HANDSHAKE]):
            await self._serve_tls()
        elif first and await self._speaks_http():
            await self._serve_http(self._wire)
        elif first:
            await self._serve_raw()

    async def _serve_raw(self) -> None:
        """Carry a protocol that is neither HTTP nor TLS, to a port that a rule names."""
        try:
            host = self._named_here()
            self.rule(host, self._port)
            upstream = await self.reach(host, self._port)
        except (Refused, Unreachable) as problem:
            await self._refuse(self._wire, problem)
            return
        await self.join(self._wire, upstream)

    async def _serve_http(self, wire: Wire, *, explicit: bool = False, ahead: asyncio.Task[Wire] | None = None) -> None:
        exchange = Exchange(self, wire, explicit=explicit, ahead=ahead)
        try:
            await exchange.run()
        except (Malformed, Refused, Unreachable) as problem:
            if exchange.answering:
                self._note_refusal(problem)
            else:
                await self._refuse(wire, problem)

    # TLS: passed on unread, unless a secret has to be put in or a refusal has to be told.

    async def _serve_tls(self) -> None:
        try:
            async with asyncio.timeout(self.head_s):
                sni = await self._server_name()
        except NotHello as problem:
            self._note_refusal(Refused(f"the first message of TLS is malformed: {problem}"))
            return
        try:
            host = self._named_by(sni)
            self.rule(host, self._port)
            if any(placeholder.belongs_to(host, self._port) for placeholder in self.outlet.placeholders):
                await self._open_up(host)
                return
            upstream = await self.reach(host, self._port)
        except (Refused, Unreachable) as problem:
            await self._refuse_tls(problem, sni)
            return
        await self.join(self._wire, upstream)

    async def _open_up(self, host: str) -> None:
        """End TLS here and begin it anew with the host, so that a secret can take its placeholder's place."""
        ahead = asyncio.ensure_future(self.reach(host, self._port, tls=True))
        try:
            await self._serve_http(await self._accept_tls(host), ahead=ahead)
        finally:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)

    async def _server_name(self) -> str | None:
        def whole(data: bytes) -> bool:
            try:
                server_name(data)
            except Incomplete:
                return False
            except NotHello:
                return True
            return True

        try:
            return server_name(await peek(self._client, whole))
        except Incomplete as error:
            raise NotHello("it was cut off") from error

    def _named_by(self, sni: str | None) -> str:
        """Return the host that TLS is for: the name in it has to be the one that was looked up."""
        name = self._named_here()
        if sni is None:
            raise Refused(f"TLS to {name} without a server name in it")
        host = self._named(sni)
        if host != name:
            raise Refused(f"TLS for {host} was sent to {name}")
        return host

    async def _refuse_tls(self, problem: Exception, sni: str | None) -> None:
        """Tell the reason where a client can read it: in an answer of HTTP, in the name of whom it asked for."""
        self._note_refusal(problem)
        if sni is None:
            return
        with contextlib.suppress(InvalidRequest, Malformed, OSError):
            async with asyncio.timeout(self.head_s):
                wire = await self._accept_tls(plain_host(sni))
                await wire.head()
                await wire.bid_farewell(self._message(problem))

    async def _accept_tls(self, host: str) -> Wire:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_BUFFER_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        context = self.outlet.authority.context(host)
        self._handed_over = True
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            self._client,
            ssl=context,
            ssl_handshake_timeout=_HANDSHAKE_S,
            ssl_shutdown_timeout=_GOODBYE_S,
        )
        return self._keep(StreamWire(reader, asyncio.StreamWriter(transport, protocol, reader, loop)))

    # What every way shares.

    def destination(self, head: Head, *, secure: bool, explicit: bool) -> tuple[str, int]:
        """Return whom a request is for, which has to be whom its client connected to unless it asks a proxy."""
        text, port = head.authority()
        if explicit:
            return self._named(text), port or (443 if secure else 80)
        name = self._named_here()
        host = self._named(text)
        if host != name:
            raise Refused(f"a request for {host} was sent to {name}")
        if port is not None and port != self._port:
            raise Refused(f"a request for port {port} was sent to port {self._port}")
        return host, self._port

    def rule(self, host: str, port: int) -> None:
        self._wanted = (host, port)
        if not self.outlet.policy.allows(host, port):
            raise Refused(f"{host}:{port} is not on the allow-list of this sandbox")
        self.bound = (host, port)

    async def reach(self, host: str, port: int, *, tls: bool = False) -> Wire:
        """Connect to a host that was ruled on."""
        sock = await self._dial(host, port)
        if not tls:
            return self._keep(SocketWire(sock))
        if self.outlet.upstream_tls is None:
            sock.close()
            raise Unreachable("there are no certificates to check hosts against")
        try:
            reader, writer = await asyncio.open_connection(
                sock=sock,
                ssl=self.outlet.upstream_tls,
                server_hostname=host,
                limit=_BUFFER_BYTES,
                ssl_handshake_timeout=_HANDSHAKE_S,
                ssl_shutdown_timeout=_GOODBYE_S,
            )
        except ssl.SSLError as error:
            raise Unreachable(f"{host} has no certificate that can be trusted ({error.reason})") from error
        except OSError as error:
            raise Unreachable(f"{host}:{port} does not speak TLS") from error
        return self._keep(StreamWire(reader, writer))

    async def join(self, wire: Wire, upstream: Wire, *, mask: Mask | None = None) -> None:
        """Carry both directions as they are, each to its end."""
        tasks = [
            asyncio.ensure_future(self._carry(wire, upstream, None)),
            asyncio.ensure_future(self._carry(upstream, wire, mask)),
        ]
        half = isinstance(wire, SocketWire) and isinstance(upstream, SocketWire)
        try:
            done, _ = await asyncio.wait(
                tasks, return_when=asyncio.FIRST_EXCEPTION if half else asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, source: Wire, target: Wire, mask: Mask | None) -> None:
        if mask:
            await pump(source, target, lambda piece: mask(self.counted(piece)))
            await target.write(mask.rest())
        else:
            await relay(source, target, self.count)
        target.end()

    def count(self, size: int) -> None:
        self.active_at = asyncio.get_running_loop().time()
        self.outlet.count(size)

    def counted(self, piece: bytes) -> bytes:
        self.count(len(piece))
        return piece

    def note_stray_body(self, text: bytes) -> None:
        name = next(entry.name for entry in self.outlet.placeholders if entry.text.encode() == text)
        self.outlet.note("stray_secret", name=name, place="the body", host=self._wanted[0])

    async def _dial(self, host: str, port: int) -> socket.socket:
        async with self.outlet.dialling:
            return await dial(self.outlet.policy, host, port)

    def _named(self, text: str) -> str:
        try:
            return plain_host(text)
        except InvalidRequest as error:
            raise Refused(f"{error.message}: only hosts by name are allowed") from error

    def _named_here(self) -> str:
        """Return the name that the client looked up to come here."""
        if self._name is None:
            raise Refused(f"{self._address} is an address: only hosts by name are allowed")
        return self._name

    def _keep(self, wire: Wire) -> Wire:
        self._others.append(wire)
        return wire

    async def _refuse(self, wire: Wire, problem: Exception) -> None:
        self._note_refusal(problem)
        await wire.bid_farewell(self._message(problem))

    def _note_refusal(self, problem: Exception) -> None:
        host, port = self._wanted
        self.outlet.note("refused", host=host, port=port, reason=str(problem))

    def _message(self, problem: Exception) -> bytes:
        status = "502" if isinstance(problem, Unreachable) else "400" if isinstance(problem, Malformed) else "403"
        return refusal(
            status,
            f"Skep blocked this request: {problem}.\n"
            f"Allowed are: {self.outlet.policy.summary()}.\n"
            "Use an allowed host, or ask the person you work for to allow this one.",
        )
