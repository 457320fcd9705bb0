"""One connection out of a sandbox: find out whom it is for, rule on it, and carry it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING

from skep.errors import InvalidRequest
from skep.sandbox.egress.dial import Unreachable, dial
from skep.sandbox.egress.http import Head, Malformed, refusal, split_authority
from skep.sandbox.egress.placeholders import Finder, Mask, Placeholder, strays, swap
from skep.sandbox.egress.policy import PROXY_PORT, normal_host
from skep.sandbox.egress.tls import HANDSHAKE, Incomplete, server_name
from skep.sandbox.egress.wire import SocketWire, StreamWire, Wire, peek, pump

if TYPE_CHECKING:
    from skep.sandbox.egress.proxy import Outlet

#: How long a client may take to say what it wants: longer, and it is only holding a place.
_FIRST_S = 15.0
#: On ports that are neither the web's nor the proxy's a server may speak first.
_SILENCE_S = 0.3
_GOODBYE_S = 2.0
_WEB_PORTS = frozenset({80, 443})


class Refused(Exception):
    """The policy does not allow it; the message is for whoever tried."""


class Connection:
    """A connection from its acceptance to its end."""

    def __init__(self, outlet: Outlet, client: socket.socket) -> None:
        self._outlet = outlet
        self._client = client
        self._wires: list[Wire] = []
        self._task: asyncio.Task[None] | None = None
        self._masks = Mask()
        #: The client's socket belongs to a transport, which closes it when it has said its last.
        self._handed_over = False
        address, self._port = client.getsockname()[:2]
        self._name = outlet.names.name(_plain(address))
        self._address = _plain(address)
        #: The host and port that it was allowed for.
        self.bound: tuple[str, int] | None = None

    async def serve(self) -> None:
        self._task = asyncio.current_task()
        try:
            self._client.setblocking(False)
            self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(self._outlet.policy.traffic.connection_s):
                await self._serve()
        except (OSError, TimeoutError, ssl.SSLError, asyncio.IncompleteReadError):
            pass  # either side went away, or time is up: closing says so
        finally:
            self._outlet.connections.discard(self)
            for wire in self._wires:
                wire.close()
            if not self._handed_over:
                self._client.close()

    def cut(self) -> None:
        """End the connection now."""
        if self._task is not None:
            self._task.cancel()

    async def _serve(self) -> None:
        if self._port == PROXY_PORT and ip_address(self._address).is_loopback:
            await self._serve_as_proxy()
        else:
            first = await self._first_bytes()
            if first[:1] == bytes([HANDSHAKE]):
                await self._serve_tls(self._name, self._port)
            elif first or self._port not in _WEB_PORTS:
                await self._serve_plain(first)

    async def _first_bytes(self) -> bytes:
        patience = _FIRST_S if self._port in _WEB_PORTS else _SILENCE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                return await peek(self._client, lambda data: True)
        return b""

    # Programs that know of a proxy ask it by name.

    async def _serve_as_proxy(self) -> None:
        wire = self._wire(SocketWire(self._client))
        try:
            async with asyncio.timeout(_FIRST_S):
                head = await wire.head()
            if head is None:
                return
            if head.method != "CONNECT":
                await self._exchange(wire, head, secure=False, name=None, port=None)
                return
            host, port = split_authority(head.target)
            self._name, self._port = self._named(host), port or 443
            self._rule(self._name, self._port)
        except (Malformed, Refused) as problem:
            await self._refuse(wire, problem)
            return
        await wire.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        first = await self._first_bytes()
        if first[:1] == bytes([HANDSHAKE]):
            await self._serve_tls(self._name, self._port)
        else:
            await self._serve_plain(first)

    # HTTP without TLS, or another protocol on a port that a rule names.

    async def _serve_plain(self, first: bytes) -> None:
        wire = self._wire(SocketWire(self._client))
        try:
            if _looks_like_http(first):
                async with asyncio.timeout(_FIRST_S):
                    head = await wire.head()
                if head is not None:
                    await self._exchange(wire, head, secure=False, name=self._name, port=self._port)
                return
            if self._name is None or self._port in _WEB_PORTS:
                raise Refused(f"only HTTP and TLS to a host by name go out on port {self._port}")
            self._rule(self._name, self._port)
            await self._join(wire, await self._reach(self._name, self._port))
        except (Malformed, Refused, Unreachable) as problem:
            await self._refuse(wire, problem)

    # TLS: passed on unread, unless a secret has to be put in or a refusal has to be told.

    async def _serve_tls(self, name: str | None, port: int) -> None:
        try:
            async with asyncio.timeout(_FIRST_S):
                sni = await self._server_name()
            host = self._named(sni)
            if name is not None and host != name:
                raise Refused(f"TLS for {host} was sent to {name}")
            if name is None:
                raise Refused(f"{self._address} is an address: only hosts by name are allowed")
            self._rule(host, port)
        except Refused as problem:
            await self._refuse_tls(problem, name)
            return
        except (Malformed, ValueError):
            return
        if any(placeholder.host == host for placeholder in self._outlet.placeholders):
            await self._open_up(host, port)
            return
        try:
            upstream = await self._reach(host, port)
        except Unreachable as problem:
            await self._refuse_tls(problem, host)
            return
        await self._join(self._wire(SocketWire(self._client)), upstream)

    async def _server_name(self) -> str:
        def whole(data: bytes) -> bool:
            try:
                server_name(data)
            except Incomplete:
                return False
            except (ValueError, IndexError, OverflowError):
                return True
            return True

        data = await peek(self._client, whole)
        try:
            name = server_name(data)
        except (Incomplete, IndexError) as error:
            raise ValueError("the hello is malformed") from error
        if name is None:
            raise Refused("TLS without a server name")
        return name

    async def _open_up(self, host: str, port: int) -> None:
        """End TLS here and speak it anew to the host, so that a secret can take its placeholder's place."""
        wire = await self._accept_tls(host)
        try:
            async with asyncio.timeout(_FIRST_S):
                head = await wire.head()
            if head is not None:
                await self._exchange(wire, head, secure=True, name=host, port=port)
        except (Malformed, Refused, Unreachable) as problem:
            await self._refuse(wire, problem)

    async def _refuse_tls(self, problem: Exception, name: str | None) -> None:
        """Tell the reason where a client can read it: in an answer of HTTP, in the name of whom it asked for."""
        self._note_refusal(problem)
        with contextlib.suppress(OSError, ssl.SSLError, TimeoutError, Malformed, Refused, ValueError):
            async with asyncio.timeout(_FIRST_S):
                sni = normal_host(await self._server_name())
                wire = await self._accept_tls(sni)
                await wire.head()
                await wire.write(self._message(problem))

    async def _accept_tls(self, host: str) -> Wire:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=256 << 10)
        protocol = asyncio.StreamReaderProtocol(reader)
        context = self._outlet.authority.context(host)
        self._handed_over = True
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, self._client, ssl=context, ssl_handshake_timeout=_FIRST_S, ssl_shutdown_timeout=_GOODBYE_S
        )
        return self._wire(StreamWire(reader, asyncio.StreamWriter(transport, protocol, reader, loop)))

    # Requests that can be read.

    async def _exchange(self, wire: Wire, head: Head, *, secure: bool, name: str | None, port: int | None) -> None:
        """Carry requests to one host, each ruled on, until either side ends.

        `name` and `port` are where the client connected to, if that is known; a request for anybody else is refused.
        """
        upstream: Wire | None = None
        answers: asyncio.Task[None] | None = None
        first: Head | None = head
        try:
            while (request := first or await wire.head()) is not None:
                first = None
                host, at = self._destination(request, name, port, secure=secure)
                self._rule(host, at)
                name, port = host, at
                if upstream is None:
                    upstream = await self._reach(host, at, tls=secure)
                    answers = asyncio.ensure_future(self._answers(upstream, wire))
                await upstream.write((await self._sealed(request, host, secure=secure)).encode())
                if request.upgrades:
                    await self._carry_on(wire, upstream, answers)
                    return
                await self._carry_body(wire, upstream, request, host)
            if answers is not None:
                await answers
        finally:
            if answers is not None:
                answers.cancel()

    def _destination(self, head: Head, name: str | None, port: int | None, *, secure: bool) -> tuple[str, int]:
        text, own_port = head.authority()
        host = self._named(text)
        at = own_port or (443 if secure else 80)
        if name is None and port is not None:
            raise Refused(f"{self._address} is an address: only hosts by name are allowed")
        if name is not None and host != name:
            raise Refused(f"a request for {host} was sent to {name}")
        if port is not None and at != port:
            raise Refused(f"a request for port {at} was sent to port {port}")
        return host, at

    async def _sealed(self, head: Head, host: str, *, secure: bool) -> Head:
        """Put secrets where their placeholders stand, if this is the place for them; tell of those that stray."""
        for placeholder, place in strays(head, self._outlet.placeholders, host=host, secure=secure):
            self._outlet.note("stray_secret", name=placeholder.name, place=place, host=host)
        if not secure:
            return head
        for placeholder in self._outlet.placeholders:
            if placeholder.host == host and _holds(head, placeholder):
                value = await self._outlet.fetch(placeholder.name)
                if value is None:
                    raise Refused(f"the secret {placeholder.name} is not to be had now")
                self._masks.texts.add(value.encode())
                head = swap(head, placeholder, value)
                self._outlet.note("secret_used", name=placeholder.name, host=host)
        return head

    async def _carry_body(self, wire: Wire, upstream: Wire, head: Head, host: str) -> None:
        finder = Finder(placeholder.text.encode() for placeholder in self._outlet.placeholders)

        async def send(piece: bytes) -> None:
            for text in finder.found(piece):
                self._outlet.note("stray_secret", name=self._placeholder_name(text), place="the body", host=host)
            await upstream.write(self._counted(piece))

        left = head.length
        if left is None:
            await _carry_chunks(wire, send)
            return
        while left:
            piece = await wire.take(left)
            if not piece:
                raise Malformed("the body was cut off")
            left -= len(piece)
            await send(piece)

    async def _answers(self, upstream: Wire, wire: Wire) -> None:
        """Carry what the host says, without any secret that it may repeat."""
        await pump(upstream, wire, lambda piece: self._masks(self._counted(piece)))
        if rest := self._masks.rest():
            await wire.write(rest)
        wire.close()

    async def _carry_on(self, wire: Wire, upstream: Wire, answers: asyncio.Task[None] | None) -> None:
        """After a request to change protocols (WebSocket) both sides are carried as they are."""
        asking = asyncio.ensure_future(pump(wire, upstream, self._counted))
        try:
            await asyncio.wait({asking, *([answers] if answers else [])}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()

    # What every way shares.

    def _named(self, text: str) -> str:
        try:
            return normal_host(text)
        except InvalidRequest as error:
            raise Refused(f"{error.message}: only hosts by name are allowed") from error

    def _rule(self, host: str, port: int) -> None:
        if not self._outlet.policy.allows(host, port):
            raise Refused(f"{host}:{port} is not on the allow-list of this sandbox")
        self.bound = (host, port)

    async def _reach(self, host: str, port: int, *, tls: bool = False) -> Wire:
        sock = await dial(self._outlet.policy, host, port)
        if not tls:
            return self._wire(SocketWire(sock))
        try:
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=self._outlet.upstream_tls, server_hostname=host, limit=256 << 10
            )
        except ssl.SSLError as error:
            raise Unreachable(f"{host} has no certificate that can be trusted ({error.reason})") from error
        return self._wire(StreamWire(reader, writer))

    async def _join(self, wire: Wire, upstream: Wire) -> None:
        """Carry both directions as they are; the first that ends is told to the other side."""
        tasks = [
            asyncio.ensure_future(_carry_to_end(wire, upstream, self._counted)),
            asyncio.ensure_future(_carry_to_end(upstream, wire, self._counted)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    def _counted(self, piece: bytes) -> bytes:
        self._outlet.bytes_used += len(piece)
        if self._outlet.bytes_used > self._outlet.policy.traffic.bytes_total:
            self._outlet.note("limited", limit="bytes")
            raise OSError("the sandbox has used up its traffic")
        return piece

    def _wire(self, wire: Wire) -> Wire:
        self._wires.append(wire)
        return wire

    def _placeholder_name(self, text: bytes) -> str:
        return next(entry.name for entry in self._outlet.placeholders if entry.text.encode() == text)

    async def _refuse(self, wire: Wire, problem: Exception) -> None:
        self._note_refusal(problem)
        await wire.write(self._message(problem))

    def _note_refusal(self, problem: Exception) -> None:
        host, port = self._name or self._address, self._port
        self._outlet.note("refused", host=host, port=port, reason=str(problem))

    def _message(self, problem: Exception) -> bytes:
        status = "502" if isinstance(problem, Unreachable) else "400" if isinstance(problem, Malformed) else "403"
        return refusal(
            status,
            f"Skep blocked this request: {problem}.\n"
            f"Allowed are: {self._outlet.policy.summary()}.\n"
            "Use an allowed host, or ask the person you work for to allow this one.",
        )


def _plain(address: str) -> str:
    parsed = ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed)


def _looks_like_http(first: bytes) -> bool:
    return first[:1].isalpha() and first[:1].isupper() and not first.startswith((b"SSH-", b"PRI "))


def _holds(head: Head, placeholder: Placeholder) -> bool:
    return any(placeholder.text in text for text in head.values(placeholder.header))


async def _carry_chunks(wire: Wire, send: Callable[[bytes], Awaitable[None]]) -> None:
    """Carry a body that comes in chunks, checking where it ends: the next request starts there."""
    while True:
        line = await wire.line()
        digits = line[:-2].split(b";")[0]
        if not digits or len(digits) > 8 or digits.strip(b"0123456789abcdefABCDEF"):
            raise Malformed("a chunk has no length")
        await send(line)
        left = int(digits, 16) + 2
        if left == 2:
            break
        while left:
            piece = await wire.take(left)
            if not piece:
                raise Malformed("the body was cut off")
            left -= len(piece)
            await send(piece)
    while (line := await wire.line()) not in (b"\r\n", b""):
        await send(line)
    await send(b"\r\n")


async def _carry_to_end(source: Wire, target: Wire, seen: Callable[[bytes], bytes]) -> None:
    await pump(source, target, seen)
    if isinstance(target, SocketWire):
        with contextlib.suppress(OSError):
            target.sock.shutdown(socket.SHUT_WR)
