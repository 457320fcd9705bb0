"""Every store keeps objects whole, and says clearly when it cannot."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.workspace.archive.bucket import CREDENTIALS, Bucket, Wire
from tests.workspace.archive.conftest import KEY
from tests.workspace.archive.likeness import likeness
from tests.workspace.archive.test_incremental import make

from skep.errors import ConfigInvalid, NotFound, StorageFull, StoreUnavailable
from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import Credentials, Store, open_store

MIB = 1 << 20


def test_what_was_put_is_got_and_found_and_listed(store: Store) -> None:
    content = {"a/one": b"1", "a/b/two": os.urandom(5 * MIB), "a/empty": b"", "b/three": b"3", "ab/four": b"4"}
    for name, data in content.items():
        store.put(name, data)
    assert {name: store.get(name) for name in content} == content
    listed = {stored.name: stored.size for stored in store.list("a/")}
    assert listed == {name: len(data) for name, data in content.items() if name.startswith("a/")}
    assert list(store.list("none/")) == []
    found = store.find("a/b/two")
    assert found is not None
    assert found.size == 5 * MIB
    store.settle()
    store.tidy(0)
    assert store.get("b/three") == b"3"


def test_a_later_put_takes_the_place_of_an_earlier_one(store: Store) -> None:
    store.put("a/one", b"first")
    store.put("a/one", b"second")
    assert store.get("a/one") == b"second"


def test_what_is_not_there_is_not_found_and_need_not_be_removed(store: Store) -> None:
    with pytest.raises(NotFound, match="a/one"):
        store.get("a/one")
    assert store.find("a/one") is None
    store.remove("a/one")
    store.put("a/one", b"1")
    store.remove("a/one")
    assert store.find("a/one") is None


def test_many_may_put_at_once(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"a/{number}", bytes([number])), range(40)))
        assert list(pool.map(lambda number: store.get(f"a/{number}"), range(40))) == [bytes([n]) for n in range(40)]


def test_a_folder_is_private_and_writes_that_were_cut_are_tidied(tmp_path: Path) -> None:
    store = open_store((tmp_path / "a b" / "store").as_uri())
    store.put("a/one", b"1")
    for path in [tmp_path / "a b" / "store", *(tmp_path / "a b" / "store").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    draft = tmp_path / "a b" / "store" / "drafts" / "cut"
    draft.write_bytes(b"half an obj")
    store.tidy(3600)
    assert draft.exists()
    os.utime(draft, (1, 1))
    store.tidy(3600)
    assert not draft.exists()


def test_a_folder_that_cannot_be_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = open_store(str(tmp_path / "file" / "store"))
    with pytest.raises(StoreUnavailable, match=re.escape(str(tmp_path / "file"))):
        store.put("a/one", b"1")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o500)
    with pytest.raises(StoreUnavailable, match="Permission denied"):
        open_store(str(tmp_path / "store")).put("a/one", b"1")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/place",
        "relative/folder",
        "file://host/folder",
        "file:",
        "",
        "s3://",
        "s3://UPPER/place",
        "s3://bucket/../other",
        "s3://bucket/place?endpoint=http://storage.example.com",
        "s3://bucket/place?endpoint=http://127.0.0.1.example.com",
        "s3://bucket/place?endpoint=ftp://127.0.0.1",
        "s3://bucket/place?endpoint=nonsense",
        "s3://bucket/place?password=secret",
        "s3://bucket/place?endpoint",
    ],
)
def test_a_place_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigInvalid) as refusal:
        open_store(url, credentials=CREDENTIALS)
    assert refusal.value.hint


def test_s3_needs_credentials_and_shows_none(bucket: Bucket) -> None:
    with pytest.raises(ConfigInvalid, match="needs credentials"):
        open_store(f"s3://{bucket.name}")
    assert "hidden" not in repr(Credentials("known", "hidden", "hidden too"))


def test_s3_is_told_who_it_is_and_takes_nothing_from_the_environment(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = {
        "AWS_ACCESS_KEY_ID": "ENVIRONMENT",
        "AWS_SECRET_ACCESS_KEY": "ENVIRONMENT",
        "AWS_SESSION_TOKEN": "ENVIRONMENT",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_ENDPOINT": "http://127.0.0.1:9",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_REGION": "environment-1",
        "AWS_DEFAULT_REGION": "environment-1",
        "AWS_ALLOW_INVALID_CERTIFICATES": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
    }
    for name, value in taken.items():
        monkeypatch.setenv(name, value)
    with Wire(bucket.endpoint) as wire:
        bucket.open(endpoint=wire.endpoint).put("a/one", b"1")
        bucket.open(endpoint=wire.endpoint, credentials=Credentials("given", "secret", "a-token")).put("a/one", b"1")
        sent = b"".join(wire.heads)
    assert b"Credential=access/" in sent
    assert b"Credential=given/" in sent
    assert b"/us-east-1/s3/" in sent
    assert sent.count(b"a-token") == 1
    assert b"nvironment" not in sent.lower()


def test_a_bucket_that_is_not_there_is_unavailable(bucket: Bucket) -> None:
    store = Bucket(bucket.endpoint, "no-such-bucket").open(patience_s=1)
    for act in (lambda: store.put("a/one", b"1"), lambda: store.get("a/one"), lambda: list(store.list("a/"))):
        with pytest.raises(StoreUnavailable, match="no bucket"):
            act()


def test_a_server_that_is_not_there_is_unavailable(bucket: Bucket) -> None:
    with Wire(bucket.endpoint) as wire:
        gone = wire.endpoint
    with pytest.raises(StoreUnavailable, match=r"cannot be reached.*a/one"):
        bucket.open(endpoint=gone, patience_s=0.5).put("a/one", b"1")


@contextmanager
def answering(status: int, code: str) -> Iterator[str]:
    """Run a server that answers every request alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "error", "told"),
    [
        (403, "AccessDenied", StoreUnavailable, "refuses the credentials"),
        (403, "QuotaExceeded", StorageFull, "no room"),
        (507, "XMinioStorageFull", StorageFull, "no room"),
        (500, "InternalError", StoreUnavailable, "cannot be reached"),
    ],
)
def test_what_a_server_says_is_passed_on(
    bucket: Bucket, status: int, code: str, error: type[Exception], told: str
) -> None:
    with answering(status, code) as endpoint, pytest.raises(error, match=told):
        bucket.open(endpoint=endpoint, patience_s=0.5).put("a/one", b"1")


async def test_a_short_cut_is_not_even_noticed(bucket: Bucket, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=200)
    with Wire(bucket.endpoint) as wire:
        archive = Archive(bucket.open(endpoint=wire.endpoint), KEY)
        for limit in (200_000, 3 * MIB):
            wire.cut_after(limit, once=True)
            await archive.save("w", [str(tree)])
        wire.cut_after(2 * MIB, once=True)
        await archive.restore("w", tmp_path / "back")
        assert wire.cuts >= 2
    assert likeness(tmp_path / "back") == likeness(tree)


@pytest.mark.parametrize("limit", [3_000, 300_000, 2 * MIB, 9 * MIB])
async def test_after_a_cut_a_save_goes_on_where_it_was(bucket: Bucket, tmp_path: Path, limit: int) -> None:
    tree = make(tmp_path / "tree", files=200)
    with Wire(bucket.endpoint) as wire:
        archive = Archive(bucket.open(endpoint=wire.endpoint, patience_s=0.5), KEY)
        wire.cut_after(limit)
        with pytest.raises(StoreUnavailable):
            await archive.save("w", [str(tree)])
        wire.mend()
        assert await archive.list() == []
        there = sum(stored.size for stored in bucket.open().list("chunks/"))
        saved = await archive.save("w", [str(tree)])
        assert there + saved.stored_bytes == sum(stored.size for stored in bucket.open().list("chunks/"))
        assert saved.stored_bytes < saved.size_bytes or there == 0
        wire.cut_after(limit)
        with pytest.raises(StoreUnavailable):
            await archive.restore("w", tmp_path / "back")
        assert [path.name for path in tmp_path.iterdir()] == ["tree"]
        wire.mend()
        await archive.restore("w", tmp_path / "back")
    assert likeness(tmp_path / "back") == likeness(tree)
