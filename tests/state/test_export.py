"""An export holds the whole log and can be verified away from the database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rfc8785

from skep.errors import InvalidRequest
from skep.state.chain import Fault, Verdict
from skep.state.checkpoint import Signer
from skep.state.database import Database
from skep.state.events import Noted
from skep.state.export import export, verify_export
from skep.state.log import EventLog

HIVE, OTHER = "hv-a", "hv-b"
COUNT = 12


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.open(tmp_path / "events.pem")


@pytest.fixture
async def lines(database: Database, signer: Signer) -> list[bytes]:
    """Give the export of two hives: for each 3 checkpoints, then 12 records."""
    log = EventLog(database, signer=signer, checkpoint_every=5)
    for number in range(COUNT):
        for hive_id in (HIVE, OTHER):
            event = Noted(text=f"note {number} \x00 \u202e é")
            await log.append(event, hive_id=hive_id, account_id="acme", actor="me")
    await log.close()
    return [line async for line in export(database, signer=signer)]


def test_every_line_is_one_canonical_json_object(lines: list[bytes]) -> None:
    assert len(lines) == 2 * (3 + COUNT)
    for line in lines:
        assert line.count(b"\n") == 1
        assert rfc8785.dumps(json.loads(line)) + b"\n" == line


def test_an_untouched_export_verifies(lines: list[bytes], signer: Signer) -> None:
    assert verify_export(lines, public_key=signer.public_key) == Verdict(24, 2, 0)


def test_an_export_verifies_without_a_key_and_says_what_that_leaves_open(lines: list[bytes]) -> None:
    verdict = verify_export(lines)
    assert (verdict.ok, verdict.unanchored) == (True, 24)
    assert any("no signing key" in remark for remark in verdict.remarks)


async def test_one_hive_alone_can_be_exported(lines: list[bytes], database: Database, signer: Signer) -> None:
    assert [line async for line in export(database, OTHER, signer=signer)] == lines[15:]
    assert [line async for line in export(database, HIVE)] == lines[3:15]


def test_a_changed_line_is_named(lines: list[bytes], signer: Signer) -> None:
    lines[3 + 6] = lines[3 + 6].replace(b"note 6", b"note 7")
    verdict = verify_export(lines, public_key=signer.public_key)
    assert verdict.faults == (Fault(HIVE, 7, "the record and its hash do not match"),)


def test_a_missing_line_is_named(lines: list[bytes], signer: Signer) -> None:
    del lines[3 + 6]
    verdict = verify_export(lines, public_key=signer.public_key)
    assert verdict.faults == (Fault(HIVE, 7, "missing: the next record is number 8"),)


def test_a_cut_end_is_named(lines: list[bytes], signer: Signer) -> None:
    verdict = verify_export(lines[:-2], public_key=signer.public_key)
    assert [(fault.hive_id, fault.seq) for fault in verdict.faults] == [(OTHER, 11)]


def test_a_line_that_is_respaced_is_named(lines: list[bytes], signer: Signer) -> None:
    lines[5] = lines[5].replace(b'"record":', b'"record": ')
    verdict = verify_export(lines, public_key=signer.public_key)
    assert verdict.faults == (Fault(HIVE, 3, "the line is not canonical JSON"),)


@pytest.mark.parametrize("line", [b"", b"nonsense\n", b"{}\n", b"[]\n", b'{"record":{"hive":"../"}}\n', b"\xff"])
def test_a_line_that_is_not_of_an_export_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidRequest, match="line 1 is not of an export"):
        verify_export([line])


async def test_the_export_of_nothing_is_empty(database: Database, signer: Signer) -> None:
    assert [line async for line in export(database, signer=signer)] == []
    assert verify_export([]) == Verdict(0, 0, 0, remarks=("no signing key was given, so no checkpoint was trusted",))
