"""An exposed port: who may come in, what the server inside gets to see, and that nothing comes out by it.

The attackers are other programs and users of the machine, pages of other sites in its browsers, and the server inside.
Each attempt comes with a control: the same with the one thing changed that makes it lawful, or unprotected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from tests.attacks.attack import Plain, outcome_in, program
from tests.sandbox.inside_server import PORT, address, ask, request, served, talk, until

from skep.errors import InvalidRequest
from skep.sandbox.ports import Bounds, Exposure
from skep.sandbox.sandbox import Sandbox


@pytest.fixture
async def exposure(sandbox: Sandbox) -> AsyncIterator[Exposure]:
    async with served(sandbox), await sandbox.expose(PORT) as opened:
        yield opened


def cookie(exposure: Exposure, **more: str) -> dict[str, str]:
    """Return the headers of a browser that has been here before."""
    names = {name.replace("_", "-"): value for name, value in more.items()}
    return {"Cookie": f"skep_token_{address(exposure)[1]}={exposure.token}", **names}


def origin(exposure: Exposure) -> str:
    return exposure.url.rstrip("/")


async def statuses(exposure: Exposure, attempt: Mapping[str, str], control: Mapping[str, str]) -> tuple[int, int]:
    return (await ask(exposure, headers=attempt)).status, (await ask(exposure, headers=control)).status


@pytest.mark.parametrize(
    "guess", ["", "x", "{token}x", "{shorter}", "{swapped}", "{token}%20", "null", "{token},{token}"]
)
@pytest.mark.parametrize("way", ["header", "cookie", "query"])
async def test_nothing_but_the_token_opens(exposure: Exposure, guess: str, way: str) -> None:
    async def tried(token: str) -> int:
        line = f"Authorization: Bearer {token}" if way == "header" else f"X-None: {way}"
        if way == "cookie":
            line = f"Cookie: skep_token_{address(exposure)[1]}={token}"
        path = f"/?skep_token={token}" if way == "query" else "/"
        return int((await talk(exposure, request(exposure, path, line, "Connection: close", token=False))).split()[1])

    text = guess.format(token=exposure.token, shorter=exposure.token[:-1], swapped=exposure.token.swapcase())
    assert await tried(text) == 401
    assert await tried(exposure.token) in (200, 303)


async def test_the_token_of_one_exposure_does_not_open_another(sandbox: Sandbox, exposure: Exposure) -> None:
    async with await sandbox.expose(PORT) as other:
        assert await statuses(exposure, other.headers, exposure.headers) == (401, 200)
        assert await statuses(other, cookie(exposure), other.headers) == (401, 200)


async def test_a_second_request_on_a_lawful_connection_needs_the_token_too(exposure: Exposure) -> None:
    lawful = request(exposure, "/one")
    said = await talk(exposure, lawful + request(exposure, "/two", "Connection: close", token=False))
    assert b"GET /two" not in said
    assert b"HTTP/1.1 401" in said
    control = await talk(exposure, lawful + request(exposure, "/two", "Connection: close"))
    assert b"GET /two" in control


async def test_a_request_hidden_behind_an_upgrade_that_was_declined_needs_the_token(exposure: Exposure) -> None:
    """Only a server that says 101 gets the rest of the connection unread."""
    hidden = request(exposure, "/hidden", "Connection: close", token=False)
    said = await talk(exposure, request(exposure, "/stays", "Upgrade: websocket") + hidden)
    assert b"GET /hidden" not in said
    reader, writer = await asyncio.open_connection(*address(exposure))
    writer.write(request(exposure, "/upgrade", "Upgrade: websocket") + hidden)
    await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(len(hidden)) == hidden
    writer.close()


@pytest.mark.parametrize(
    ("lines", "body"),
    [
        (["Content-Length: 4", "Transfer-Encoding: chunked"], b"0\r\n\r\n"),
        (["Content-Length: 0", "Content-Length: 60"], b""),
        (["Content-Length: +0"], b""),
        (["Transfer-Encoding: chunked, identity"], b"0\r\n\r\n"),
        (["Transfer-Encoding : chunked"], b"0\r\n\r\n"),
        (["Transfer-Encoding: chunked"], b"1\r\nab\r\n0\r\n\r\n"),
        (["Upgrade: websocket", "Content-Length: 60"], b""),
    ],
    ids=str,
)
async def test_a_request_cannot_be_smuggled_behind_another(exposure: Exposure, lines: list[str], body: bytes) -> None:
    """What two readers could understand differently is refused."""
    hidden = request(exposure, "/hidden", "Connection: close", token=False)
    said = await talk(exposure, request(exposure, "/body", *lines, method="POST") + body + hidden)
    assert b"GET /hidden" not in said
    assert b"HTTP/1.1 400" in said
    control = request(exposure, "/body", "Transfer-Encoding: chunked", method="POST") + b"1\r\na\r\n0\r\n\r\n"
    assert b"GET /hidden" in await talk(exposure, control + request(exposure, "/hidden", "Connection: close"))


@pytest.mark.parametrize(
    "host",
    ["evil.test", "evil.test:{port}", "127.0.0.1.evil.test:{port}", "127.0.0.1", "localhost:1", "0.0.0.0:{port}"],
)
async def test_another_name_that_leads_here_is_refused(exposure: Exposure, host: str) -> None:
    """A page whose name is made to point at this machine comes with its own name, and with the cookie if it can."""
    port = address(exposure)[1]
    attempt = {**cookie(exposure), **exposure.headers, "Host": host.format(port=port)}
    assert await statuses(exposure, attempt, {**attempt, "Host": f"localhost:{port}"}) == (403, 200)


@pytest.mark.parametrize("other", ["https://evil.test", "null", "http://127.0.0.1:1", "http://localhost.evil.test"])
@pytest.mark.parametrize("protocol", ["http", "websocket"])
async def test_a_page_of_another_origin_cannot_use_the_cookie(exposure: Exposure, other: str, protocol: str) -> None:
    more = {"Upgrade": "websocket", "Connection": "Upgrade, close"} if protocol == "websocket" else {}
    attempt = {**cookie(exposure, Origin=other), **more}
    control = {**cookie(exposure, Origin=origin(exposure)), **more}
    assert await statuses(exposure, attempt, control) == (403, 200)
    with_header = {**exposure.headers, "Origin": other, **more}
    assert (await ask(exposure, headers=with_header)).status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_elsewhere_cannot_use_the_cookie_without_saying_its_origin(exposure: Exposure, site: str) -> None:
    """An image or a form of another site; and for a browser all ports of this machine are one site."""
    attempt, control = cookie(exposure, Sec_Fetch_Site=site), cookie(exposure, Sec_Fetch_Site="same-origin")
    assert await statuses(exposure, attempt, control) == (403, 200)


async def test_a_page_from_inside_cannot_install_a_service_worker(exposure: Exposure) -> None:
    """It would stay in the browser and meet whatever is exposed at that port next."""
    control = cookie(exposure, Sec_Fetch_Site="same-origin")
    assert await statuses(exposure, {**control, "Service-Worker": "script"}, control) == (403, 200)


@pytest.mark.parametrize("target", ["//evil.test/x", "/\\evil.test", "/%0d%0aX-Evil:1", "/%22%3e%3cscript%3e"])
async def test_the_link_cannot_lead_a_browser_elsewhere(exposure: Exposure, target: str) -> None:
    for site in ({}, {"Sec-Fetch-Site": "cross-site"}):
        answer = await ask(exposure, f"{target}?skep_token={exposure.token}", site)
        assert answer.headers.get("Location", origin(exposure) + target) == origin(exposure) + target
        assert "X-Evil" not in answer.headers
        assert f"url={origin(exposure)}{target.replace('<', '')}" in answer.text
    control = await ask(exposure, f"/x?skep_token={exposure.token}", {})
    assert control.headers["Location"] == origin(exposure) + "/x"


@pytest.mark.parametrize("way", ["header", "cookie", "old cookie", "query", "referer", "absolute"])
async def test_the_server_inside_never_sees_the_token(exposure: Exposure, way: str) -> None:
    """Nor that of another exposure: a browser sends the cookies of all ports to each."""
    port, token = address(exposure)[1], exposure.token
    path, lines = "/echo", [f"Cookie: keep=1; skep_token_1=another; skep_token_{port}={token}", "Connection: close"]
    match way:
        case "header":
            lines = [f"Authorization: bearer   {token}", "Cookie: keep=1; skep_token_1=another", "Connection: close"]
        case "old cookie":
            lines[0] = f"Cookie: skep_token={token};keep=1;skep_token_1=another"
        case "query":
            path, lines = f"/echo?a=1&skep_token={token}&b=2", ["Cookie: keep=1;", "Connection: close", "Upgrade: x"]
        case "referer":
            lines.append(f"Referer: {exposure.link}")
        case "absolute":
            path = f"{exposure.url}echo?skep_token={token}"
            lines.append(f"Authorization: Bearer {token}")
    said = await talk(exposure, request(exposure, path, *lines, token=False))
    assert said.startswith(b"HTTP/1.1 200")
    assert b"keep=1" in said
    assert token.encode() not in said
    assert b"another" not in said
    control = await talk(exposure, request(exposure, "/echo", "X-Other: visible", "Connection: close"))
    assert b"X-Other: visible" in control


async def test_the_token_has_not_been_inside_after_all_lawful_use(exposure: Exposure) -> None:
    """The server keeps all that it was ever sent; a mark is in it, the token is not."""
    for headers in (exposure.headers, cookie(exposure), cookie(exposure, Authorization=f"Bearer {exposure.token}")):
        assert (await ask(exposure, headers={**headers, "X-Other": "MARK-0123456789"})).status == 200
    assert (await ask(exposure, f"/?skep_token={exposure.token}", {}, method="POST", body=b"")).status == 200

    async def was_seen(text: str) -> str:
        return (await ask(exposure, f"/saw?{text.encode().hex()}")).text

    assert (await was_seen("MARK-0123456789"), await was_seen(exposure.token)) == ("yes", "no")
    assert await was_seen(exposure.token[:16]) == "no"


async def test_nothing_inside_reaches_the_host_by_an_exposed_port(
    sandbox: Sandbox, exposure: Exposure, tmp_path: Path
) -> None:
    """The listener is the host's: inside there is no such port. With the host's network there would be."""
    text = program(
        """
        s = socket.create_connection(there, timeout=5)
        s.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')
        assert s.recv(100)
        """,
        there=address(exposure),
    )
    assert (await Plain(("--share-net",)).outcome(text, tmp_path)).through
    assert not (await outcome_in(sandbox, text)).through


async def test_those_who_say_nothing_do_not_keep_others_out(sandbox: Sandbox) -> None:
    """All places are taken by visitors that send a byte now and then; they lose them, and others are served."""
    async with served(sandbox), await sandbox.expose(PORT, bounds=Bounds(connections=4, head_s=0.5)) as exposure:
        slow = [await asyncio.open_connection(*address(exposure)) for _ in range(4)]

        async def drip() -> bool:
            for _, writer in slow:
                if not writer.is_closing():
                    writer.write(b"G")
            return (await ask(exposure)).status == 200

        await until(drip)
        for _, writer in slow:
            writer.close()
    async with served(sandbox), await sandbox.expose(PORT, bounds=Bounds(connections=4, head_s=60)) as exposure:
        patient = [await asyncio.open_connection(*address(exposure)) for _ in range(4)]
        assert (await ask(exposure)).status == 503
        for _, writer in patient:
            writer.close()


@pytest.mark.parametrize("mode", [0o755, 0o711, 0o770, 0o701])
async def test_a_unix_socket_is_not_made_where_others_could_reach_it(
    sandbox: Sandbox, tmp_path: Path, mode: int
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(InvalidRequest, match="others than you"):
        await sandbox.expose(PORT, at=str(folder / "socket"))
    folder.chmod(0o700)
    await (await sandbox.expose(PORT, at=str(folder / "socket"))).close()


async def test_a_unix_socket_is_not_made_behind_a_link(sandbox: Sandbox, tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(InvalidRequest):
        await sandbox.expose(PORT, at=str(tmp_path / "link" / "socket"))
    await (await sandbox.expose(PORT, at=str(folder / "socket"))).close()
