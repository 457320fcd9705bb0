"""Stores to keep archives in: a folder, and a server on this machine that speaks S3."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.workspace.archive.bucket import Bucket, serving

from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import Store, open_store

KEY = bytes(range(32))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Give the address of an S3 server, started for the session."""
    with serving() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3_server: str) -> Bucket:
    """Give a new, empty bucket."""
    made = Bucket(s3_server, f"bucket-{secrets.token_hex(8)}")
    made.create()
    return made


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    """Run the test once per kind of store, each time with an empty one."""
    if request.param == "folder":
        kept: Store = request.getfixturevalue("folder_store")
        return kept
    bucket: Bucket = request.getfixturevalue("bucket")
    return bucket.open()


@pytest.fixture
def archive(store: Store) -> Archive:
    return Archive(store, KEY)
