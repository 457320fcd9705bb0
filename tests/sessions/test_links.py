"""A link leads to one port of one session, for a while, and stands for nothing else."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from skep.errors import Corrupt, Denied, InvalidRequest, Unavailable
from skep.sessions.links import MAX_TTL_S, Link, Links

KEY = bytes(range(32))
NOW = 1_800_000_000.0
SESSION = "0b7c1c1e-5d0e-5f7b-9a44-7c1d1e8a9b53"


@pytest.fixture
def links() -> Links:
    return Links(KEY)


def test_what_was_made_can_be_read_until_it_ends(links: Links) -> None:
    token = links.make(SESSION, 8000, ttl_s=60, now=NOW)
    assert links.read(token, NOW + 59.9) == Link(SESSION, 8000, NOW + 60)
    assert links.read(token, NOW, session_id=SESSION, port=8000).port == 8000
    with pytest.raises(Denied, match="expired"):
        links.read(token, NOW + 60)


def test_a_link_fits_into_an_address(links: Links) -> None:
    token = links.make("cli:ünï/../?&=#", 65535, ttl_s=MAX_TTL_S, now=NOW)
    assert token.isascii()
    assert set(token) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")
    assert links.read(token, NOW).session_id == "cli:ünï/../?&=#"


@pytest.mark.parametrize("wrong", [{"port": 8001}, {"session_id": "another"}, {"session_id": "another", "port": 8000}])
def test_a_link_is_for_no_other_port_or_session(wrong: dict[str, object], links: Links) -> None:
    token = links.make(SESSION, 8000, ttl_s=60, now=NOW)
    with pytest.raises(Denied, match="another port"):
        links.read(token, NOW, **wrong)  # type: ignore[arg-type]


def test_every_changed_character_is_noticed(links: Links) -> None:
    token = links.make(SESSION, 8000, ttl_s=60, now=NOW)
    for place, character in enumerate(token):
        for other in {"A", "B", "_", "="} - {character}:
            with pytest.raises(Denied):
                links.read(token[:place] + other + token[place + 1 :], NOW)


def test_what_a_link_says_cannot_be_said_by_anybody_else(links: Links) -> None:
    text, _, signature = links.make(SESSION, 8000, ttl_s=60, now=NOW).partition(".")
    said = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    said[1], said[2] = 22, NOW * 2
    forged = base64.urlsafe_b64encode(json.dumps(said).encode()).rstrip(b"=").decode()
    with pytest.raises(Denied):
        links.read(f"{forged}.{signature}", NOW)
    # With the key it can be: the signature is all that protects it.
    assert links.read(f"{forged}.{links._signature(forged)}", NOW).port == 22


def test_another_key_reads_nothing(links: Links) -> None:
    token = links.make(SESSION, 8000, ttl_s=60, now=NOW)
    with pytest.raises(Denied):
        Links(bytes(32)).read(token, NOW)


def test_a_signature_by_the_same_key_for_another_purpose_is_none(links: Links) -> None:
    import hmac

    text, _, _ = links.make(SESSION, 8000, ttl_s=60, now=NOW).partition(".")
    for message in (text.encode(), b"skep preview link 1" + text.encode(), b"skep preview link 1\0" + text.encode()):
        other = base64.urlsafe_b64encode(hmac.digest(KEY, message, "sha256")).rstrip(b"=").decode()
        with pytest.raises(Denied):
            links.read(f"{text}.{other}", NOW)


@given(some.text(max_size=200))
def test_any_other_text_is_denied_and_nothing_worse(token: str) -> None:
    with pytest.raises(Denied):
        Links(KEY).read(token, NOW)


@pytest.mark.parametrize("token", ["", ".", "x" * 100_000, "." * 2000, "a.b", "\udc80.\udc80", "ä.ö"])
def test_tokens_of_odd_forms_are_denied(token: str, links: Links) -> None:
    with pytest.raises(Denied):
        links.read(token, NOW)


@pytest.mark.parametrize(
    ("session_id", "port", "ttl_s"),
    [
        (SESSION, 0, 60),
        (SESSION, 65536, 60),
        (SESSION, 80, 0),
        (SESSION, 80, -1),
        (SESSION, 80, MAX_TTL_S + 1),
        (SESSION, 80, float("nan")),
        (SESSION, 80, float("inf")),
        ("", 80, 60),
        ("x" * 201, 80, 60),
    ],
)
def test_a_link_that_makes_no_sense_is_not_made(session_id: str, port: int, ttl_s: float, links: Links) -> None:
    with pytest.raises(InvalidRequest):
        links.make(session_id, port, ttl_s=ttl_s, now=NOW)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        Links(b"short")


def test_the_key_is_made_once_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "links.key"
    token = Links.open(path).make(SESSION, 8000, ttl_s=60, now=NOW)
    assert Links.open(path).read(token, NOW).port == 8000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_bytes()) == 32
    assert [file.name for file in path.parent.iterdir()] == ["links.key"]


def test_a_key_that_others_could_read_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "links.key"
    Links.open(path)
    path.chmod(0o640)
    with pytest.raises(Denied, match="0640"):
        Links.open(path)


def test_a_damaged_key_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "links.key"
    Links.open(path)
    path.write_bytes(b"short")
    with pytest.raises(Corrupt):
        Links.open(path)


def test_a_link_in_the_place_of_the_key_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(32))
    (tmp_path / "other").chmod(0o600)
    (tmp_path / "links.key").symlink_to(tmp_path / "other")
    with pytest.raises(Unavailable):
        Links.open(tmp_path / "links.key")


def test_processes_that_begin_at_once_share_one_key(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from skep.sessions.links import Links;"
        f"print(Links.open(Path(sys.argv[1])).make('s', 80, ttl_s=60, now={NOW}))"
    )
    path = tmp_path / "keys" / "links.key"
    command = [sys.executable, "-c", program, os.fspath(path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    tokens = {process.communicate(timeout=60)[0].strip() for process in running}
    assert len(tokens) == 1
    assert Links.open(path).read(tokens.pop(), NOW).session_id == "s"
