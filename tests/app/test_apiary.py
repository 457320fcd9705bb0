"""A workspace's sandbox has what its template and the settings give it: limits, network, places, programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from skep.app.apiary import Apiary, with_resources
from skep.config import Paths, Settings
from skep.errors import InvalidRequest, WorkspaceBusy
from skep.sandbox.erase import erase
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.stack import Mount
from skep.workspace.template.template import Resources


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    yield folder
    erase(str(folder), folder.stat().st_ino)


def apiary(home: Path, **settings: object) -> Apiary:
    paths = Paths(config=home / "config.json", home=home, logs=home / "log")
    return Apiary(paths, Settings.model_validate(settings))


def template(home: Path, **parts: object) -> str:
    """Write a template without packages; JSON is YAML too."""
    file = home / "templates" / "plot.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"version": 1, "name": "plot", "python": {}, **parts}))
    return "plot"


def test_a_template_says_more_or_less_than_the_settings_and_they_decide_the_rest() -> None:
    most = Limits(cpus=2, memory_bytes=100 * MIB, disk_bytes=50 * MIB, processes=30)
    told = with_resources(most, Resources(cpus=0.5, disk_mb=70))
    assert (told.cpus, told.memory_bytes, told.disk_bytes, told.processes) == (0.5, 100 * MIB, 70 * MIB, 30)


async def test_the_sandbox_has_the_limits_and_programs_of_its_template(home: Path) -> None:
    garden = apiary(home)
    name = template(home, resources={"processes": 33}, system={"shell": "sh", "editor": "nano"})
    await garden.create("w", template=name)
    async with garden.enter("w") as sandbox:
        assert sandbox.limits.processes == 33
        assert (await sandbox.run("echo $SHELL $EDITOR")).text == "/bin/sh nano\n"


@pytest.mark.parametrize(
    ("security", "settings", "allow", "reached"),
    [
        ({}, {}, (), None),
        ({}, {"policy": {"allowed_hosts": ["a.example"]}}, (), {"a.example"}),
        ({"network": "allowed", "allowed_domains": ["b.example"]}, {}, (), {"b.example"}),
        ({"network": "allowed", "allowed_domains": ["b.example"]}, {}, ("c.example",), {"b.example", "c.example"}),
        (
            {"network": "packages"},
            {"packages": {"python_index": "http://i.example/simple", "node_registry": "http://n.example"}},
            (),
            {"i.example", "n.example"},
        ),
    ],
)
def test_only_what_somebody_allows_is_reached(
    home: Path, security: dict[str, object], settings: dict[str, object], allow: tuple[str, ...], reached: set[str]
) -> None:
    garden = apiary(home, **settings)
    network = garden.network(garden.templates.show(template(home, security=security)), allow)
    found = None if network is None else {rule.host for rule in network.policy.rules}
    assert found == reached


async def test_a_place_can_be_read_only_but_for_a_part_of_it(home: Path) -> None:
    garden = apiary(home)
    paths = {"read_only_paths": ["/workspace/atlas"], "writable_paths": ["/workspace/atlas/notes"]}
    await garden.create("w", template=template(home, security=paths))
    async with garden.enter("w"):
        pass
    (home / "places/w/atlas/map").write_text("here be bees")
    async with garden.enter("w") as sandbox:
        assert (await sandbox.run("cat atlas/map")).text == "here be bees"
        refused = [await sandbox.run(attempt) for attempt in ("echo x > atlas/map", "rm atlas/map", "mv atlas x")]
        assert [one.ok for one in refused] == [False, False, False]
        assert (await sandbox.run("echo seen > atlas/notes/today")).ok
    async with garden.enter("w") as sandbox:
        assert (await sandbox.run("cat atlas/notes/today")).text == "seen\n"
    assert (home / "places/w/atlas/notes/today").stat().st_uid == (home / "places/w/atlas/notes").stat().st_uid


async def test_a_workspace_whose_template_is_gone_goes_on_with_nothing_allowed(home: Path) -> None:
    garden = apiary(home)
    security = {"network": "allowed", "allowed_domains": ["b.example"]}
    await garden.create("w", template=template(home, security=security))
    assert garden.at("w").outfit.network is not None
    (home / "templates/plot.yaml").unlink()
    assert garden.at("w").outfit.network is None
    async with garden.enter("w") as sandbox:
        assert (await sandbox.run("true")).ok


async def test_a_template_that_became_wrong_stops_the_work(home: Path) -> None:
    garden = apiary(home)
    await garden.create("w", template=template(home))
    template(home, security={"network": "everything"})
    with pytest.raises(InvalidRequest, match="network"):
        async with garden.enter("w"):
            pytest.fail("it must not start")


async def test_an_act_and_a_command_have_the_same_outfit(home: Path) -> None:
    """Whoever joins while an act holds the workspace finds what a command would have found."""
    garden = apiary(home)
    await garden.create("w", template=template(home, system={"editor": "nano"}))
    async with garden.at("w").hold("w") as workspace:
        assert (await (await workspace.sandbox()).run("echo $EDITOR")).text == "nano\n"


async def test_who_joins_and_wants_more_is_refused_and_who_does_not_is_let_in(home: Path) -> None:
    garden, shown = apiary(home), home / "shown"
    shown.mkdir()
    await garden.create("w")
    async with garden.at("w").hold("w") as workspace:
        await (await workspace.sandbox()).run("echo 1 > one")
        async with garden.enter("w") as joined:
            assert (await joined.run("cat one")).text == "1\n"
        with pytest.raises(WorkspaceBusy, match="is in use"):
            async with garden.enter("w", mounts=[Mount(str(shown), "/workspace/shown")]):
                pytest.fail("it must not be let in")


async def test_an_unknown_template_makes_nothing(home: Path) -> None:
    garden = apiary(home, workspace={"template": "nothing"})
    with pytest.raises(InvalidRequest, match="nothing"):
        await garden.create("w")
    assert garden.ids() == []
