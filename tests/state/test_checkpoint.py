"""The signing key is private, its signatures hold, and the files beside it only move forward."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from skep.errors import Corrupt, Denied, InvalidRequest, Unavailable
from skep.state.checkpoint import Anchors, Checkpoint, Signer

AT = "2026-01-02T03:04:05.000006Z"
HASH = bytes(range(32))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "events.pem"


@pytest.fixture
def signer(key_file: Path) -> Signer:
    return Signer.open(key_file)


def test_a_new_key_is_readable_by_its_owner_alone(signer: Signer, key_file: Path) -> None:
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
    assert [file.name for file in key_file.parent.iterdir()] == ["events.pem"]


def test_the_same_key_is_loaded_again(signer: Signer, key_file: Path) -> None:
    assert Signer.open(key_file).public_key == signer.public_key


def test_those_who_start_at_once_share_one_key(key_file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = {signer.public_key for signer in pool.map(Signer.open, [key_file] * 16)}
    assert len(keys) == 1
    assert [file.name for file in key_file.parent.iterdir()] == ["events.pem"]


def test_a_key_that_others_may_read_is_refused_with_the_way_out(signer: Signer, key_file: Path) -> None:
    key_file.chmod(0o640)
    with pytest.raises(Denied, match="mode 0640") as refusal:
        Signer.open(key_file)
    assert refusal.value.hint == f"chmod 600 {key_file}"


@pytest.mark.parametrize("content", [b"", b"no key at all", b"-----BEGIN PRIVATE KEY-----\n"])
def test_a_damaged_key_is_corrupt_and_left_as_it_is(key_file: Path, content: bytes) -> None:
    key_file.parent.mkdir()
    key_file.write_bytes(content)
    key_file.chmod(0o600)
    with pytest.raises(Corrupt, match="not a private key"):
        Signer.open(key_file)
    assert key_file.read_bytes() == content


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a file in the way")
    with pytest.raises(Unavailable, match="keys") as refusal:
        Signer.open(tmp_path / "keys" / "events.pem")
    assert refusal.value.hint


def test_a_signature_covers_every_field(signer: Signer) -> None:
    signed = signer.sign("hv-a", 7, HASH, at=AT)
    assert signer.vouches_for(signed)
    changed = [
        replace(signed, hive_id="hv-b"),
        replace(signed, seq=8),
        replace(signed, hash=bytes(32)),
        replace(signed, at=AT.replace("2026", "2027")),
        replace(signed, key_id="0" * 16),
        replace(signed, signature=bytes(64)),
    ]
    assert not any(signer.vouches_for(each) for each in changed)


def test_another_key_does_not_vouch(signer: Signer, tmp_path: Path) -> None:
    other = Signer(Ed25519PrivateKey.generate(), Anchors(tmp_path))
    assert not other.vouches_for(signer.sign("hv-a", 7, HASH, at=AT))


def test_the_newest_checkpoint_of_each_hive_is_kept(signer: Signer) -> None:
    anchors = signer.anchors
    for hive_id, seq in (("hv-a", 5), ("hv-b", 1), ("hv-a", 9), ("hv-a", 7)):
        anchors.store(signer.sign(hive_id, seq, HASH, at=AT))
    assert anchors.hive_ids() == ["hv-a", "hv-b"]
    newest = anchors.newest("hv-a")
    assert newest is not None
    assert newest.seq == 9
    assert signer.vouches_for(newest)
    assert anchors.newest("hv-c") is None


def test_concurrent_stores_never_go_back_nor_leave_a_torn_file(signer: Signer) -> None:
    signed = [signer.sign("hv-a", seq, HASH, at=AT) for seq in range(1, 41)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(signer.anchors.store, signed))
    assert signer.anchors.newest("hv-a") == signed[-1]
    assert sorted(file.name for file in signer.anchors.folder.iterdir()) == [".lock", "hv-a.json"]


def test_a_damaged_checkpoint_file_is_named(signer: Signer) -> None:
    signer.anchors.store(signer.sign("hv-a", 5, HASH, at=AT))
    file = signer.anchors.folder / "hv-a.json"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(Corrupt, match=r"hv-a\.json does not hold a checkpoint"):
        signer.anchors.newest("hv-a")


def test_a_hive_id_cannot_lead_out_of_the_folder(signer: Signer) -> None:
    with pytest.raises(InvalidRequest, match="hive_id"):
        signer.anchors.store(signer.sign("../../hv-a", 5, HASH, at=AT))


def test_checkpoints_set_aside_are_kept_but_no_longer_count(signer: Signer) -> None:
    assert signer.anchors.set_aside("restored") is None
    signed: Checkpoint = signer.sign("hv-a", 5, HASH, at=AT)
    signer.anchors.store(signed)
    kept = signer.anchors.set_aside("restored")
    assert kept is not None
    assert signer.anchors.newest("hv-a") is None
    assert Anchors(kept).newest("hv-a") == signed
