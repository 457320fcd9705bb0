"""Templates add to each other by plain rules, and their hash is that of what a snapshot would hold."""

from __future__ import annotations

import pytest

from skep.workspace.template.semver import Range
from skep.workspace.template.template import NodeJS, Python, Resources, Security, System, Template, extend


def template(**parts: object) -> Template:
    return Template.model_validate({"version": 1, "name": "garden", **parts})


def security(base: dict[str, object], child: dict[str, object]) -> Security:
    return extend(template(security=base), template(security=child)).security


def test_the_childs_name_and_description_are_its_own() -> None:
    whole = extend(template(name="base", description="of the base"), template(name="child", extends="base"))
    assert (whole.name, whole.description, whole.extends) == ("child", "", None)


def test_packages_are_added_and_the_childs_requirement_wins_in_place() -> None:
    base = template(python={"version": "3.12", "dependencies": ["numpy", "Pillow>=10", "requests"]})
    child = template(python={"dependencies": ["pillow==11.*", "scipy"]})
    assert extend(base, child).python == Python(
        version="3.12", dependencies=("numpy", "pillow==11.*", "requests", "scipy")
    )


def test_the_childs_requirement_replaces_all_of_the_bases_for_that_package() -> None:
    base = template(python={"dependencies": ["t<2; python_version<'3.12'", "n", "t>=2; python_version>='3.12'"]})
    child = template(python={"dependencies": ["t==3"]})
    whole = extend(base, child).python
    assert whole is not None
    assert whole.dependencies == ("t==3", "n")


def test_node_packages_are_added_and_the_childs_range_wins() -> None:
    base = template(nodejs={"runtime": "bun", "dependencies": ["axios@^0.27", "@scope/a"]})
    child = template(nodejs={"version": ">=18", "dependencies": ["dotenv", "axios@^1"]})
    assert extend(base, child).nodejs == NodeJS(
        version=">=18", runtime="bun", dependencies=("axios@^1", "@scope/a", "dotenv")
    )


def test_a_part_that_only_one_has_is_taken_whole() -> None:
    base, child = template(python={"dependencies": ["numpy"]}), template(nodejs={})
    whole = extend(base, child)
    assert (whole.python, whole.nodejs) == (base.python, child.nodejs)


def test_a_value_replaces_the_bases_only_if_it_is_said() -> None:
    base = template(system={"shell": "sh", "editor": "vim"}, resources={"cpus": 4, "memory_mb": 1024})
    child = template(system={"editor": "nano"}, resources={"memory_mb": 2048})
    whole = extend(base, child)
    assert whole.system == System(shell="sh", editor="nano")
    assert whole.resources == Resources(cpus=4, memory_mb=2048)


def test_domains_are_joined_without_saying_the_same_twice() -> None:
    base: dict[str, object] = {"network": "allowed", "allowed_domains": ["example.org", "pypi"]}
    whole = security(base, {"allowed_domains": ["Example.org.", "example.com"]})
    assert (whole.network, whole.allowed_domains) == ("allowed", ("Example.org.", "pypi", "example.com"))


@pytest.mark.parametrize("network", ["none", "packages"])
def test_a_child_that_closes_the_network_does_not_inherit_its_domains(network: str) -> None:
    base: dict[str, object] = {"network": "allowed", "allowed_domains": ["example.org"]}
    assert security(base, {"network": network}) == Security.model_validate({"network": network})


def test_a_path_is_what_the_child_says() -> None:
    base: dict[str, object] = {"read_only_paths": ["/workspace/a", "/workspace/b"], "writable_paths": ["/workspace/c"]}
    whole = security(base, {"read_only_paths": ["/workspace/c"], "writable_paths": ["/workspace/a"]})
    assert whole.read_only_paths == ("/workspace/b", "/workspace/c")
    assert whole.writable_paths == ("/workspace/a",)


def test_extending_is_the_same_in_one_step_or_in_two() -> None:
    one = template(python={"dependencies": ["a", "b==1"]}, system={"shell": "sh"})
    two = template(python={"dependencies": ["b==2", "c"]}, security={"network": "packages"})
    three = template(python={"version": "3.12", "dependencies": ["a>1"]}, resources={"cpus": 1})
    assert extend(extend(one, two), three) == extend(one, extend(two, three))


def test_the_hash_is_that_of_the_packages_whatever_their_order_and_spelling() -> None:
    first = template(python={"dependencies": ["numpy>=1,<3", "Pillow"]}, nodejs={"dependencies": ["a", "b"]})
    second = template(python={"dependencies": ["pillow", "NumPy <3, >=1"]}, nodejs={"dependencies": ["b", "a"]})
    assert first.recipe_hash() == second.recipe_hash()
    assert len(first.recipe_hash()) == 64


def test_the_hash_leaves_out_what_a_snapshot_does_not_hold() -> None:
    plain = template(python={})
    other = template(python={}, name="other", description="x", security={"network": "packages"}, resources={"cpus": 1})
    assert plain.recipe_hash() == other.recipe_hash()


def test_the_hash_differs_with_anything_that_a_snapshot_holds() -> None:
    recipes: list[dict[str, object]] = [
        {},
        {"python": {}},
        {"nodejs": {}},
        {"python": {"version": "3.12"}},
        {"python": {"dependencies": ["a"]}},
        {"python": {"dependencies": ["a==1"]}},
        {"nodejs": {"dependencies": ["a"]}},
        {"nodejs": {"dependencies": ["a@1"]}},
        {"nodejs": {"runtime": "bun"}},
        {"nodejs": {"version": "20"}},
    ]
    assert len({template(**recipe).recipe_hash() for recipe in recipes}) == len(recipes)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("20", ["20.0.0", "v20.11.1"], ["19.9.9", "21.0.0"]),
        ("20.x", ["20.5.0"], ["21.0.0"]),
        ("*", ["0.0.1", "99.0.0"], []),
        ("", ["18.0.0"], []),
        (">=18", ["18.0.0", "30.1.2"], ["17.9.9"]),
        (">18", ["19.0.0"], ["18.0.0", "18.20.1"]),
        (">18.1.2", ["18.1.3"], ["18.1.2"]),
        ("<=18", ["18.20.0", "4.0.0"], ["19.0.0"]),
        ("<18", ["17.9.9"], ["18.0.0"]),
        ("^18.2.0", ["18.2.0", "18.99.0"], ["18.1.9", "19.0.0"]),
        ("^0.2.3", ["0.2.3", "0.2.9"], ["0.3.0", "1.0.0"]),
        ("^0.0.3", ["0.0.3"], ["0.0.4"]),
        ("^0", ["0.9.9"], ["1.0.0"]),
        ("~18.2", ["18.2.9"], ["18.3.0"]),
        ("~18", ["18.9.0"], ["19.0.0"]),
        ("18.2 - 20", ["18.2.0", "20.9.9"], ["18.1.0", "21.0.0"]),
        (">=16 <18", ["16.0.0", "17.9.0"], ["18.0.0"]),
        (">= 16 < 18", ["17.0.0"], ["18.0.0"]),
        ("16 || >=20", ["16.1.0", "22.0.0"], ["18.0.0"]),
        ("=18.1.0", ["18.1.0"], ["18.1.1"]),
        (">=18.0.0-rc.1", ["18.0.0"], ["17.0.0"]),
    ],
)
def test_ranges_of_node_mean_what_npm_means_by_them(text: str, inside: list[str], outside: list[str]) -> None:
    wanted = Range.parse(text)
    assert [version for version in inside if not wanted.contains(version)] == []
    assert [version for version in outside if wanted.contains(version)] == []
