"""Templates are found by name, put together from what they extend, and written for people to change."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from skep.errors import Conflict, InvalidRequest, NotFound, TemplateInvalid
from skep.workspace.template.draft import written
from skep.workspace.template.review import fields_at, review
from skep.workspace.template.templates import SHIPPED, Templates

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guides/templates.md"
NAMES = ["data-science", "default", "minimal", "web-dev"]


@pytest.fixture
def templates(tmp_path: Path) -> Templates:
    (tmp_path / "templates").mkdir()
    return Templates(tmp_path / "templates")


def put(templates: Templates, name: str, rest: str = "") -> Path:
    file = templates.folder / f"{name}.yaml"
    file.write_text(f"version: 1\nname: {name}\n{rest}")
    return file


def told(templates: Templates, name: str) -> list[str]:
    return [str(problem) for problem in templates.check(name)]


def test_four_templates_are_shipped_and_all_of_them_are_right(tmp_path: Path) -> None:
    found = Templates(tmp_path / "absent").list()
    assert [(info.name, info.origin, info.problems) for info in found] == [(name, "shipped", 0) for name in NAMES]
    assert all(info.description for info in found)


def test_the_default_has_what_most_tasks_need(templates: Templates) -> None:
    default = templates.show("default")
    assert default.python is not None
    assert default.nodejs is not None
    assert default.python.dependencies == ("matplotlib", "pandas", "numpy", "requests", "python-dotenv", "pillow")
    assert default.nodejs.dependencies == ("docx", "axios", "dotenv")
    assert default.security.network == "none"


def test_the_minimal_one_needs_no_package_at_all(templates: Templates) -> None:
    minimal = templates.show("minimal")
    assert minimal.python is not None
    assert (minimal.python.dependencies, minimal.python.version, minimal.nodejs) == ((), None, None)


def test_the_shipped_templates_are_in_the_wheel() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="pip install hatchling -c constraints.txt")
    included = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"skep/workspace/template/shipped/{name}.yaml" for name in NAMES} <= included


def test_a_chain_is_put_together_from_its_end(templates: Templates) -> None:
    put(templates, "garden", "extends: data-science\npython:\n  dependencies: [numpy<3, bees]\n")
    chain = templates.chain("garden")
    assert chain.names == ("garden", "data-science", "default", "minimal")
    assert chain.template.python is not None
    assert chain.template.python.dependencies[:3] == ("matplotlib", "pandas", "numpy<3")
    assert chain.template.python.dependencies[-2:] == ("openpyxl", "bees")
    assert chain.template.resources.memory_mb == 8192


def test_ones_own_template_takes_the_place_of_a_shipped_one(templates: Templates) -> None:
    put(templates, "minimal", "description: mine\nsystem: {shell: sh}\n")
    assert templates.show("minimal").description == "mine"
    assert templates.show("default").system.shell == "sh"  # which extends it
    assert [info.origin for info in templates.list() if info.name == "minimal"] == ["own"]


def test_what_is_extended_must_exist(templates: Templates) -> None:
    put(templates, "garden", "extends: defualt\npyton: 1\n")
    assert told(templates, "garden") == [
        "3:1: extends: there is no template defualt; did you mean default?",
        "4:1: pyton: is not a known field; did you mean python?",
    ]
    put(templates, "plot", "extends: orchard\n")
    put(templates, "orchard", "extends: nowhere\n")
    assert told(templates, "plot")[0].startswith(
        "3:1: extends: there is no template nowhere: plot -> orchard -> nowhere"
    )


def test_a_circle_is_named(templates: Templates) -> None:
    put(templates, "a", "extends: b\n")
    put(templates, "b", "extends: c\n")
    put(templates, "c", "extends: b\n")
    put(templates, "self", "extends: self\n")
    assert told(templates, "a")[0].startswith("3:1: extends: goes round in a circle: a -> b -> c -> b; let one")
    assert told(templates, "self")[0].startswith("3:1: extends: goes round in a circle: self -> self")


def test_a_chain_has_an_end(templates: Templates) -> None:
    put(templates, "t0")
    for number in range(1, 9):
        put(templates, f"t{number}", f"extends: t{number - 1}\n")
    assert told(templates, "t7") == []
    assert told(templates, "t8")[0].startswith("3:1: extends: is a chain of more than 8 templates: t8 -> t7 -> ")


def test_a_base_that_is_wrong_is_named_with_the_way_to_it(templates: Templates) -> None:
    put(templates, "bad", "pyton: 1\n")
    put(templates, "good", "extends: bad\n")
    assert told(templates, "good") == [
        "3:1: extends: needs bad, which is wrong itself: good -> bad; skep template check bad"
    ]


def test_a_network_that_makes_no_sense_with_the_base_is_told(templates: Templates) -> None:
    put(templates, "open", "security:\n  network: allowed\n  allowed_domains: [example.org]\n")
    put(templates, "more", "extends: open\nsecurity:\n  allowed_domains: [example.com]\n")
    put(templates, "lost", "extends: minimal\nsecurity:\n  allowed_domains: [example.com]\n")
    put(templates, "void", "extends: minimal\nsecurity:\n  network: allowed\n")
    assert templates.show("more").security.allowed_domains == ("example.org", "example.com")
    assert told(templates, "lost")[0].startswith("5:3: security.allowed_domains: has no effect with network: none")
    assert told(templates, "void")[0].startswith("5:3: security.network: is allowed, and no domain is")


def test_a_wrong_template_is_refused_with_all_that_is_wrong(templates: Templates) -> None:
    file = put(templates, "garden", "pyton: 1\nnodejs: 2\n")
    with pytest.raises(TemplateInvalid) as refused:
        templates.show("garden")
    assert refused.value.message == (
        f"{file}:3:1: pyton: is not a known field; did you mean python?\n"
        f"{file}:4:1: nodejs: should hold fields of its own, got 2"
    )
    assert refused.value.hint == "correct it, then run: skep template check garden"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "..", "", "a\0b", "A", "x.yaml"])
def test_a_name_never_leads_out_of_the_folder(templates: Templates, name: str) -> None:
    put(templates, "garden").rename(templates.folder.parent / "secret.yaml")
    for find in (templates.show, templates.source, templates.new):
        with pytest.raises(InvalidRequest, match="not a valid name"):
            find(name)
    with pytest.raises(InvalidRequest, match="not a valid name"):
        templates.new("garden", base=name)
    assert list(templates.folder.iterdir()) == []


def test_what_is_not_there_is_told_with_what_is_near(templates: Templates) -> None:
    with pytest.raises(NotFound) as missing:
        templates.show("data-sience")
    assert missing.value.hint == "did you mean data-science?"
    put(templates, "garden").rename(templates.folder / "garden.yml")
    with pytest.raises(NotFound) as misnamed:
        templates.show("garden")
    assert (misnamed.value.hint or "").startswith("call the file garden.yaml: mv ")
    with pytest.raises(NotFound, match="there is no file"):
        templates.check(templates.folder / "absent.yaml")


def test_a_file_elsewhere_can_be_checked_by_its_path(templates: Templates, tmp_path: Path) -> None:
    file = put(templates, "garden", "extends: default\n").rename(tmp_path / "garden.yaml")
    assert templates.check(file) == templates.check(str(file)) == []
    assert templates.check(file.rename(tmp_path / "orchard.yaml"))[0].field == "name"


def test_what_cannot_be_read_is_a_problem_and_stops_nothing(templates: Templates) -> None:
    os.mkfifo(templates.folder / "pipe.yaml")
    (templates.folder / "folder.yaml").mkdir()
    (templates.folder / "link.yaml").symlink_to("nowhere")
    (templates.folder / "large.yaml").write_bytes(b"#" * 100_000)
    (templates.folder / "Not A Name.yaml").write_text("version: 1\nname: name\n")
    assert told(templates, "pipe") == told(templates, "folder")
    assert told(templates, "pipe")[0].startswith("1:1: is not a regular file")
    assert told(templates, "link")[0].startswith("1:1: cannot be read: no such file or directory")
    assert told(templates, "large")[0].startswith("1:1: is larger than 64 kB")
    wrong = [info.name for info in templates.list() if info.problems]
    assert wrong == ["Not A Name", "folder", "large", "link", "pipe"]


@pytest.mark.parametrize("base", [None, *NAMES])
def test_a_new_template_is_right_and_like_its_base(templates: Templates, base: str | None) -> None:
    file = templates.new("garden", base=base)
    assert file == templates.folder / "garden.yaml"
    assert templates.check("garden") == []
    if base is not None:
        ours, theirs = templates.show("garden"), templates.show(base)
        assert ours.model_dump(exclude={"name", "description"}) == theirs.model_dump(exclude={"name", "description"})


def test_every_line_that_a_new_template_has_as_a_comment_is_right_when_it_is_switched_on(templates: Templates) -> None:
    """What is commented out is either a sentence or YAML; switched on, the YAML has to be right as well."""
    text = templates.new("garden").read_text()
    sentences = ("# A template", "# Another", "# Python,", "# Packages", "# none:", "# Below", "# What a")
    lines = [line for line in text.splitlines() if not line.strip().startswith(sentences)]
    switched = "\n".join(line.replace("# ", "", 1) if line.lstrip().startswith("#") else line for line in lines)
    switched = switched.replace("network: none", "network: allowed")
    found = review(switched.encode(), name="garden")
    assert [str(problem) for problem in found.problems] == []
    assert found.template is not None
    assert found.template.nodejs is not None
    assert found.template.nodejs.dependencies == ("axios@^1.7", "@scope/name")
    assert found.template.resources.processes == 512
    assert found.template.security.writable_paths == ("/workspace/reference/notes",)


def test_a_new_template_is_never_written_over_another(templates: Templates) -> None:
    file = put(templates, "garden", "description: precious\n")
    with pytest.raises(Conflict, match="is there already"):
        templates.new("garden")
    with pytest.raises(Conflict, match="is a template that Skep ships"):
        templates.new("default")
    assert "precious" in file.read_text()
    assert [one.name for one in templates.folder.iterdir()] == ["garden.yaml"]  # and no draft is left


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot be written: not a directory"):
        Templates(tmp_path / "file" / "templates").new("garden")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_can_be_read_again(templates: Templates, name: str) -> None:
    template = templates.show(name)
    assert review(written(template).encode(), name=name).template == template


def test_what_yaml_would_misread_is_shown_in_quotes(templates: Templates) -> None:
    put(
        templates,
        "garden",
        "python: {version: 3.10}\nnodejs: {dependencies: ['@a/b']}\n"
        "security: {network: allowed, allowed_domains: ['*.example.org']}\n",
    )
    template = templates.show("garden")
    assert yaml.safe_load(written(template))["python"]["version"] == "3.10"
    assert review(written(template).encode()).template == template


def test_importing_the_package_brings_none_of_it_along() -> None:
    code = (
        "import sys, skep, skep.workspace, skep.cli.template; print('yaml' in sys.modules, 'packaging' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "False False\n"


def test_the_template_in_the_guide_is_right(templates: Templates) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (templates.folder / "garden.yaml").write_text(text)
    python = templates.show("garden").python
    assert python is not None
    assert python.dependencies[1] == "pandas>=2.2,<3"


def test_the_guide_names_every_field() -> None:
    text = GUIDE.read_text()
    parts = {name: fields_at((name,)) for name in ("python", "nodejs", "system", "security", "resources")}
    named = [f"{part}.{field}" for part, fields in parts.items() if part != "resources" for field in fields]
    assert [name for name in named if f"| `{name}` |" not in text] == []
    assert [name for name in parts["resources"] if name not in text] == []


def test_the_shipped_folder_holds_nothing_else() -> None:
    assert sorted(file.name for file in SHIPPED.iterdir()) == [f"{name}.yaml" for name in NAMES]
