"""Servers inside, reached from the host."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.sandbox.inside_server import MEGABYTE, PORT, address, ask, request, served, talk, until

from skep.errors import Conflict, InvalidRequest, NotFound
from skep.sandbox.bubblewrap import BubblewrapSandbox
from skep.sandbox.ports import Bounds, Exposure
from skep.sandbox.sandbox import Sandbox


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox.create() as made:
        yield made


@pytest.fixture
async def exposure(sandbox: Sandbox) -> AsyncIterator[Exposure]:
    """Give a way in to a server that runs."""
    async with served(sandbox), await sandbox.expose(PORT) as opened:
        yield opened


async def test_a_server_inside_answers_whoever_holds_the_token(exposure: Exposure) -> None:
    answer = await ask(exposure, "/echo?a=1&b=2", {**exposure.headers, "X-Mine": "kept"})
    assert answer.status == 200
    assert answer.text.startswith("GET /echo?a=1&b=2 HTTP/1.1\r\n")
    assert "X-Mine: kept" in answer.text


async def test_without_the_token_the_answer_says_how_to_give_it(exposure: Exposure) -> None:
    answer = await ask(exposure, headers={})
    assert answer.status == 401
    assert "Authorization: Bearer" in answer.text
    assert "?skep_token=" in answer.text


async def test_the_link_becomes_a_cookie_and_a_clean_address(exposure: Exposure) -> None:
    path = "/" + exposure.link.removeprefix(exposure.url)
    welcome = await ask(exposure, path.replace("/?", "/page?x=1&"), {})
    assert welcome.status == 303
    assert welcome.headers["Location"] == f"{exposure.url}page?x=1"
    cookie, *attributes = welcome.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
    answer = await ask(exposure, "/page?x=1", {"Cookie": f"mine=1; {cookie}"})
    assert answer.status == 200
    assert "mine=1" in answer.text


async def test_a_link_followed_from_another_site_leads_on_from_a_page_of_ours(exposure: Exposure) -> None:
    """A browser does not send a strict cookie after a redirect that another site began."""
    path = "/" + exposure.link.removeprefix(exposure.url)
    welcome = await ask(exposure, path, {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})
    assert welcome.status == 200
    assert f'content="0;url={exposure.url}"' in welcome.text
    assert "Set-Cookie" in welcome.headers


async def test_a_port_without_a_server_says_so_and_serves_once_there_is_one(sandbox: Sandbox) -> None:
    async with await sandbox.expose(PORT) as exposure:
        answer = await ask(exposure)
        assert answer.status == 502
        assert "start the server" in answer.text
        async with served(sandbox):
            assert (await ask(exposure)).status == 200


async def test_one_connection_carries_many_requests(exposure: Exposure) -> None:
    def send() -> list[tuple[int, bytes]]:
        connection = http.client.HTTPConnection(*address(exposure), timeout=20)
        answers = []
        for method, path in [("GET", "/chunked"), ("HEAD", "/echo"), ("POST", "/body"), ("GET", "/chunked")]:
            body = b"x" * 1000 if method == "POST" else None
            connection.request(method, path, body, exposure.headers)
            first = connection.sock
            response = connection.getresponse()
            answers.append((response.status, response.read()))
            assert connection.sock is first
        connection.close()
        return answers

    assert await asyncio.to_thread(send) == [(200, b"one two"), (200, b""), (200, b"1000"), (200, b"one two")]


async def test_requests_sent_at_once_are_answered_in_their_order(exposure: Exposure) -> None:
    first = request(exposure, "/one")
    last = request(exposure, "/two", "Connection: close")
    said = await talk(exposure, first + last)
    assert said.count(b"HTTP/1.1 200 OK") == 2
    assert said.index(b"GET /one") < said.index(b"GET /two")


async def test_a_websocket_carries_bytes_both_ways(exposure: Exposure) -> None:
    reader, writer = await asyncio.open_connection(*address(exposure))
    writer.write(request(exposure, "/upgrade", "Upgrade: websocket", "Connection: Upgrade", f"Origin: {exposure.url}"))
    assert b"101 Switching" in await reader.readuntil(b"\r\n\r\n")
    for piece in (b"\x81\x05hello", b"GET / HTTP/1.1\r\n\r\n", os.urandom(300_000)):
        writer.write(piece)
        assert await reader.readexactly(len(piece)) == piece
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    ("path", "said"),
    [("/to-the-end", b"to the end"), ("/chunked", b" two\r\n0\r\n\r\n"), ("/lines", b"hello\n")],
)
async def test_an_answer_ends_where_the_server_ends_it(exposure: Exposure, path: str, said: bytes) -> None:
    assert (await talk(exposure, request(exposure, path, "Connection: close"))).endswith(said)


async def test_a_server_that_hangs_up_is_told_of(exposure: Exposure) -> None:
    answer = await ask(exposure, "/nothing")
    assert (answer.status, "without an answer" in answer.text) == (502, True)


async def test_a_body_may_wait_until_the_server_asks_for_it(exposure: Exposure) -> None:
    reader, writer = await asyncio.open_connection(*address(exposure))
    writer.write(request(exposure, "/continue", "Content-Length: 5", "Expect: 100-continue", method="POST"))
    assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
    writer.write(b"12345")
    await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(1) == b"5"
    writer.close()


async def test_large_bodies_pass_in_both_directions(exposure: Exposure) -> None:
    up = await ask(exposure, "/body", method="POST", body=bytes(50 * MEGABYTE))
    assert up.text == str(50 * MEGABYTE)
    down = await ask(exposure, "/big?50")
    assert len(down.text) == 50 * MEGABYTE


async def test_a_body_in_chunks_passes_and_the_next_request_is_found_behind_it(exposure: Exposure) -> None:
    head = request(exposure, "/body", "Transfer-Encoding: chunked", method="POST")
    said = await talk(
        exposure, head + b"5\r\nhello\r\n3\r\n...\r\n0\r\n\r\n", request(exposure, "/z", "Connection: close")
    )
    assert b"\r\n\r\n8HTTP/1.1 200" in said
    assert b"GET /z" in said


async def test_a_visitor_that_does_not_read_holds_the_server_back(exposure: Exposure) -> None:
    """An answer of 1 GB for somebody who does not read it stays where it is: inside."""
    _, writer = await asyncio.open_connection(*address(exposure), limit=1 << 16)
    writer.write(request(exposure, "/big?1000"))
    before = -1

    async def stands_still() -> bool:
        nonlocal before
        last, before = before, int((await ask(exposure, "/sent")).text)
        return before > 0 and last == before

    await until(stands_still)
    assert before < 100 * MEGABYTE
    writer.close()


async def test_a_unix_socket_carries_any_bytes_and_each_direction_to_its_own_end(sandbox: Sandbox) -> None:
    """A program that answers only when it has read everything gets to see the end."""
    sorter = await sandbox.start(
        ["/usr/bin/python3", "-c", "import socket\ns = socket.create_server(('127.0.0.1', 9000))\n"
         "c, _ = s.accept()\nf = c.makefile('rwb')\nf.writelines(sorted(f.readlines()))\nf.flush()"]
    )  # fmt: skip
    async with await sandbox.expose(9000, at="unix") as exposure:
        path = Path(exposure.token)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

        async def sorted_lines() -> bool:
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(b"c\nb\na\n")
                writer.write_eof()
                return await reader.read() == b"a\nb\nc\n"
            except ConnectionError:
                return False
            finally:
                writer.close()

        await until(sorted_lines)
    assert not path.parent.exists()
    sorter.release()


async def test_a_unix_socket_is_made_where_asked_and_removed_again(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "ports" / "web"
    async with served(sandbox), await sandbox.expose(PORT, at=str(path)) as exposure:
        assert exposure.path == str(path)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /echo HTTP/1.0\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        with pytest.raises(Conflict):
            await sandbox.expose(PORT, at=str(path))
    assert not path.exists()


@pytest.mark.parametrize(
    "at", ["0.0.0.0:0", "192.168.1.1:80", "example.org:80", "127.0.0.1", "127.0.0.1:99999", "relative/path", ""]
)
async def test_only_this_machine_is_let_in(sandbox: Sandbox, at: str) -> None:
    with pytest.raises(InvalidRequest):
        await sandbox.expose(PORT, at=at)


async def test_a_taken_port_is_a_conflict(sandbox: Sandbox, exposure: Exposure) -> None:
    with pytest.raises(Conflict):
        await sandbox.expose(PORT, at=f"127.0.0.1:{address(exposure)[1]}")


@pytest.mark.parametrize("at", ["127.0.0.1:0", "[::1]:0"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_both_kinds_of_loopback_are_tried(sandbox: Sandbox, host: str, at: str) -> None:
    """What `localhost` means differs between programs, inside and outside."""
    async with served(sandbox, host=host), await sandbox.expose(PORT, at=at) as exposure:
        assert (await ask(exposure)).status == 200


async def test_closing_ends_the_listener_and_every_connection(sandbox: Sandbox) -> None:
    async with served(sandbox):
        exposure = await sandbox.expose(PORT)
        reader, writer = await asyncio.open_connection(*address(exposure))
        writer.write(request(exposure, "/upgrade", "Upgrade: websocket"))
        await reader.readuntil(b"\r\n\r\n")
        await exposure.close()
        assert await reader.read() == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address(exposure))


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_lost_sandbox_ends_its_exposures_within_two_seconds(how: str) -> None:
    async with Sandbox.create() as sandbox, served(sandbox):
        exposure = await sandbox.expose(PORT)
        reader, writer = await asyncio.open_connection(*address(exposure))
        writer.write(request(exposure, "/upgrade", "Upgrade: websocket"))
        await reader.readuntil(b"\r\n\r\n")
        if how == "stopped":
            await sandbox.stop()
        else:
            assert isinstance(sandbox, BubblewrapSandbox)
            os.kill(sandbox.launcher.pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            assert await reader.read() == b""

        async def closed() -> bool:
            return exposure.closed

        await until(closed, within_s=2)
        writer.close()


async def test_more_connections_than_allowed_are_turned_away_and_told(sandbox: Sandbox) -> None:
    async with served(sandbox), await sandbox.expose(PORT, bounds=Bounds(connections=2)) as exposure:
        holding = [await asyncio.open_connection(*address(exposure)) for _ in range(2)]
        for reader, writer in holding:
            writer.write(request(exposure))
            await reader.readuntil(b"\r\n\r\n")
        assert b" 503 " in await talk(exposure)
        for _, writer in holding:
            writer.close()

        async def served_again() -> bool:
            return (await ask(exposure)).status == 200

        await until(served_again)


async def test_silence_is_ended(sandbox: Sandbox) -> None:
    """Who says nothing loses the place: before the first request, between two, and in another protocol."""
    bounds = Bounds(head_s=0.3, idle_s=0.3)
    async with served(sandbox), await sandbox.expose(PORT, bounds=bounds) as exposure:
        assert await talk(exposure) == b""
        assert await talk(exposure, b"GET / HT") == b""
        assert (await talk(exposure, request(exposure))).startswith(b"HTTP/1.1 200")
        assert (await talk(exposure, request(exposure, "/upgrade", "Upgrade: websocket"))).startswith(b"HTTP/1.1 101")


async def test_a_connection_by_itself(sandbox: Sandbox) -> None:
    """Whoever needs no exposure gets a socket, or is told that nobody listens."""
    with pytest.raises(NotFound, match="nothing answers on port 8000"):
        await sandbox.connect(PORT)
    with pytest.raises(InvalidRequest):
        await sandbox.connect(70_000)
    async with served(sandbox):
        with await sandbox.connect(PORT) as sock:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, b"GET /echo HTTP/1.0\r\nConnection: close\r\n\r\n")
            assert (await loop.sock_recv(sock, 1000)).startswith(b"HTTP/1.1 200")


async def test_no_descriptor_stays_behind(sandbox: Sandbox) -> None:
    """Not after use, and not when those who ask for connections go away while they wait."""
    async with served(sandbox):
        await asyncio.to_thread(lambda: None)
        before = len(list(Path("/proc/self/fd").iterdir()))
        async with await sandbox.expose(PORT) as exposure:
            await asyncio.gather(*(ask(exposure) for _ in range(20)))
            assert await talk(exposure, b"nonsense\r\n\r\n") != b""
        for turns in range(12):
            asking = asyncio.ensure_future(sandbox.connect(PORT))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            for made in await asyncio.gather(asking, return_exceptions=True):
                if isinstance(made, socket.socket):
                    made.close()
        await sandbox.run("true")  # the answers to all that was asked have come by now
        assert len(list(Path("/proc/self/fd").iterdir())) == before
