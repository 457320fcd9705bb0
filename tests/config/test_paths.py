"""Files are where the XDG rules put them, unless Skep's own variables say otherwise."""

from __future__ import annotations

from pathlib import Path

from skep.config import Paths


def test_the_usual_places() -> None:
    paths = Paths.of({"HOME": "/home/me"})
    assert paths.config == Path("/home/me/.config/skep/config.json")
    assert paths.home == Path("/home/me/.local/share/skep")
    assert paths.log_file == Path("/home/me/.local/state/skep/log/skep.log")
    assert paths.default_state_url == "sqlite:////home/me/.local/share/skep/skep.db"


def test_the_xdg_variables_move_them() -> None:
    variables = {"HOME": "/h", "XDG_CONFIG_HOME": "/c", "XDG_DATA_HOME": "/d", "XDG_STATE_HOME": "/s"}
    paths = Paths.of(variables)
    assert (paths.config, paths.home) == (Path("/c/skep/config.json"), Path("/d/skep"))
    assert paths.logs == Path("/s/skep/log")


def test_a_relative_xdg_path_is_ignored_as_the_rules_say() -> None:
    assert Paths.of({"HOME": "/h", "XDG_DATA_HOME": "data"}).home == Path("/h/.local/share/skep")


def test_skeps_own_variables_win() -> None:
    paths = Paths.of({"HOME": "/h", "SKEP_CONFIG": "/x/my.json", "SKEP_HOME": "/x/state"})
    assert (paths.config, paths.home, paths.config_named) == (Path("/x/my.json"), Path("/x/state"), True)


def test_an_empty_variable_counts_as_unset() -> None:
    paths = Paths.of({"HOME": "/h", "SKEP_CONFIG": "", "SKEP_HOME": ""})
    assert (paths.home, paths.config_named) == (Path("/h/.local/share/skep"), False)


def test_a_relative_home_is_made_absolute(tmp_path: Path) -> None:
    assert Paths.of({"HOME": "/h", "SKEP_HOME": "here"}).home == Path.cwd() / "here"
