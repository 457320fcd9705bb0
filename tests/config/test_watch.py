"""A running process takes a valid change, and keeps what it has when the change is not valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from skep.config import Change, ConfigWatch, Paths, Settings, load
from skep.errors import ConfigInvalid


class Watched:
    """A config file with a watch on it, and what the watch has said."""

    def __init__(self, folder: Path, text: str = "{}") -> None:
        self.file = folder / "config.json"
        self.file.write_text(text)
        paths = Paths(config=self.file, home=folder, logs=folder)
        self.changes: list[Change] = []
        self.refusals: list[ConfigInvalid] = []
        self.watch = ConfigWatch(paths, load(paths), applied=self.changes.append, refused=self.refusals.append)

    def polls(self, count: int) -> None:
        for _ in range(count):
            self.watch.poll()

    @property
    def steps(self) -> int:
        return self.watch.settings.budgets.steps_per_task


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_nothing_is_said_while_nothing_changes(watched: Watched) -> None:
    watched.polls(3)
    assert (watched.changes, watched.refusals) == ([], [])


def test_a_valid_change_is_in_effect_at_the_next_look(watched: Watched) -> None:
    watched.file.write_text('{"budgets": {"steps_per_task": 7}}')
    watched.polls(1)
    assert watched.steps == 7
    assert [change.changed for change in watched.changes] == [("budgets",)]


def test_a_change_of_blanks_only_is_not_announced(watched: Watched) -> None:
    watched.file.write_text("{ }\n")
    watched.polls(2)
    assert watched.changes == []


def test_an_invalid_change_keeps_the_old_settings_and_names_the_field_once(watched: Watched) -> None:
    watched.file.write_text('{\n "budgets": {"steps_per_task": 0}}')
    watched.polls(5)
    assert watched.watch.settings == Settings()
    assert [error.message for error in watched.refusals] == [
        f"{watched.file}: budgets.steps_per_task (line 2, column 14): should be greater than or equal to 1, got 0"
    ]


def test_a_file_caught_half_written_is_not_reported(watched: Watched) -> None:
    watched.file.write_text('{"budgets": {"steps_per')
    watched.polls(1)
    watched.file.write_text('{"budgets": {"steps_per_task": 8}}')
    watched.polls(1)
    assert (watched.steps, watched.refusals) == (8, [])


def test_a_correction_after_a_mistake_takes_effect(watched: Watched) -> None:
    watched.file.write_text("{")
    watched.polls(2)
    watched.file.write_text('{"budgets": {"steps_per_task": 9}}')
    watched.polls(1)
    assert (watched.steps, len(watched.refusals)) == (9, 1)


def test_going_back_to_the_old_content_after_a_mistake_says_nothing(watched: Watched) -> None:
    watched.file.write_text("{")
    watched.polls(2)
    watched.file.write_text("{}")
    watched.polls(2)
    assert (watched.changes, len(watched.refusals)) == ([], 1)


def test_a_file_that_vanishes_keeps_the_settings_in_effect(tmp_path: Path) -> None:
    watched = Watched(tmp_path, '{"budgets": {"steps_per_task": 7}}')
    watched.file.unlink()
    watched.polls(4)
    assert watched.steps == 7
    assert [error.message for error in watched.refusals] == [
        f"{watched.file} is gone; the last settings stay in effect"
    ]


def test_a_file_that_turns_unreadable_keeps_the_settings_in_effect(tmp_path: Path) -> None:
    watched = Watched(tmp_path, '{"budgets": {"steps_per_task": 7}}')
    watched.file.unlink()
    watched.file.mkdir()  # unreadable for root too, unlike a mode of 000
    watched.polls(4)
    assert watched.steps == 7
    assert [error.message for error in watched.refusals] == [f"{watched.file} is not a regular file"]


def test_a_file_replaced_by_rename_is_noticed(watched: Watched) -> None:
    fresh = watched.file.with_name("fresh")
    fresh.write_text('{"budgets": {"steps_per_task": 7}}')
    fresh.rename(watched.file)
    watched.polls(1)
    assert watched.steps == 7


def test_what_needs_a_restart_is_said(watched: Watched) -> None:
    watched.file.write_text('{"state_url": "postgresql://u@h/d"}')
    watched.polls(1)
    assert watched.changes[0].needs_restart == ("state_url",)
