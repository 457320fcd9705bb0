"""The key of archives is made once, for its owner alone, and never by halves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skep.errors import ConfigInvalid, Denied, NotFound
from skep.workspace.archive.archive import Archive
from skep.workspace.archive.key import Key, ensure_key, load_key
from skep.workspace.archive.store import open_store


def test_a_key_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "archive.key"
    made = ensure_key(path)
    assert len(made) == 32
    assert ensure_key(path) == load_key(path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [found.name for found in path.parent.iterdir()] == ["archive.key"]
    assert ensure_key(tmp_path / "other.key") != made


def test_of_many_who_make_one_all_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: ensure_key(tmp_path / "archive.key"), range(50)))
    assert len(set(keys)) == 1


def test_a_key_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    ensure_key(tmp_path / "archive.key")
    (tmp_path / "archive.key").chmod(0o640)
    with pytest.raises(Denied, match="other users") as refusal:
        load_key(tmp_path / "archive.key")
    assert "chmod 600" in str(refusal.value.hint)


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_what_is_no_key_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "archive.key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigInvalid, match="32 bytes"):
        ensure_key(path)
    assert path.read_bytes() == content
    with pytest.raises(ConfigInvalid, match="32 bytes"):
        Archive(open_store(str(tmp_path / "store")), content)


def test_a_key_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no key"):
        load_key(tmp_path / "archive.key")


def test_a_key_is_never_shown() -> None:
    key = Key.of(bytes(range(32)))
    assert key.sealing.hex() not in repr(key)
    assert repr(key.sealing) not in repr(key)
    assert len({key.sealing, key.naming, key.id}) == 3
