"""Every mistake in a template is named with its line and column, and says what to do; all of them at once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skep.workspace.template.review import fields_at, review

HEAD = "version: 1\nname: garden\n"


def told(text: str | bytes, name: str | None = None) -> list[str]:
    content = text if isinstance(text, bytes) else text.encode()
    return [str(problem) for problem in review(content, name=name).problems]


def wrong(rest: str) -> str:
    """Return the one problem of a template that is right up to here."""
    (problem,) = told(HEAD + rest)
    return problem


def test_a_template_needs_no_more_than_a_version_and_a_name() -> None:
    template = review(HEAD.encode()).template
    assert template is not None
    assert (template.name, template.python, template.security.network) == ("garden", None, "none")


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    text = HEAD + (
        "pyton: 1\n"
        "python:\n"
        "  dependencies:\n"
        "    - numpy>=2\n"
        "    - requests=2\n"
        "    - NumPy\n"
        "nodejs: {runtime: deno}\n"
        "security:\n"
        "  allowed_domains: ['*.com']\n"
        "resources:\n"
        "  cpus: -1\n"
    )
    assert told(text) == [
        "3:1: pyton: is not a known field; did you mean python?",
        "7:7: python.dependencies[1]: 'requests=2' is not a requirement; an exact version is written with ==",
        "8:7: python.dependencies[2]: says the same as dependencies[0]; keep one of the two",
        "9:10: nodejs.runtime: should be 'node' or 'bun', got \"deno\"",
        "11:3: security.allowed_domains: has no effect with network: none; write network: allowed",
        "11:21: security.allowed_domains[0]: '*.com' allows a whole top-level domain; "
        "name the domain itself, such as *.example.org",
        "13:3: resources.cpus: should be greater than 0, got -1",
    ]


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ("name: other\n", "3:1: name: is given twice, first on line 2; keep one of the two"),
        ("colour: red\n", "3:1: colour: is not a known field; known here: version, name, description"),
        ("python: {versoin: '3'}\n", "3:10: python.versoin: is not a known field; did you mean version?"),
        ("python: fast\n", '3:1: python: should hold fields of its own, got "fast"'),
        ("python:\n  dependencies: numpy\n", '4:3: python.dependencies: should be a list, got "numpy"; put each entry'),
        ("nodejs:\n  dependencies:\n    axios: 1\n", "4:3: nodejs.dependencies: should be a list, got fields; put"),
        ("python:\n  dependencies:\n  - a: b\n", "5:5: python.dependencies[0]: should be text, got fields; write it"),
        ("python:\n  dependencies:\n  -\n", "5:4: python.dependencies[0]: should be text, got nothing"),
        ("description: 12\n", "3:1: description: should be text, got 12; put it in quotes: '12'"),
        ("description: " + "x" * 1001 + "\n", "3:1: description: has 1001 characters, and 1000 are the most"),
        (f"python: {{dependencies: {[f'p{n}' for n in range(501)]}}}\n", "3:10: python.dependencies: has 501 entries"),
        ("system: {shell: fish}\n", "3:10: system.shell: should be 'bash' or 'sh', got \"fish\""),
        ("system: {editor: rm -rf}\n", '3:10: system.editor: should be the name of a program, such as vim, got "rm'),
        ("resources: {memory_mb: 1.5}\n", "3:13: resources.memory_mb: should be a whole number, got 1.5"),
        ("resources: {processes: yes}\n", '3:13: resources.processes: should be a whole number, got "yes"'),
        ("resources: {cpus: 1e400}\n", "3:13: resources.cpus: should be a finite number"),
        ("resources: {disk_mb: 9999999999999999999999}\n", "3:13: resources.disk_mb: should be a whole number, got"),
        ("security: {network: allowed}\n", "3:12: security.network: is allowed, and no domain is; list some under"),
        ("security: {network: open}\n", "3:12: security.network: should be 'none', 'packages' or 'allowed', got"),
    ],
)
def test_a_mistake_has_its_place_and_says_what_to_do(rest: str, problem: str) -> None:
    assert wrong(rest).startswith(problem)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("-r requirements.txt", "is a flag of an installer"),
        ("--index-url=http://x", "is a flag of an installer"),
        ("tool @ https://example.org/tool.whl", "is fetched from an address of its own"),
        ("tool@file:///etc", "is fetched from an address of its own"),
        ("git+https://example.org/tool", "is fetched from an address of its own"),
        ("./tool", "is a path, not a package"),
        ("/opt/tool", "is a path, not a package"),
        ("tool-1.0-py3-none-any.whl", "is a path, not a package"),
        ("dir/tool", "is a path, not a package"),
        ("numpy>>1", "is not a requirement: "),
        ("two words", "is not a requirement: "),
        ("python>=3.11", "is the language itself; say it in python.version"),
        ("x" * 201, "is not the name of a package"),
        (" ", "is not the name of a package"),
    ],
)
def test_python_dependencies_are_names_and_versions_alone(entry: str, problem: str) -> None:
    found = wrong(f"python:\n  dependencies:\n    - '{entry}'\n")
    assert found.startswith("5:7: python.dependencies[0]: ")
    assert problem in found


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("--registry=x", "is a flag of an installer"),
        ("axios@https://example.org/a.tgz", "is fetched from an address of its own"),
        ("axios@npm:other", "is fetched from an address of its own"),
        ("github:user/repo", "is fetched from an address of its own"),
        ("user/repo", "is a path, not a package"),
        ("axios@user/repo", "is a path, not a package"),
        ("../axios", "is a path, not a package"),
        ("axios.tgz", "is a path, not a package"),
        ("axios@local.tar.gz", "is a path, not a package"),
        ("Axios", "is not the name of a package"),
        ("node_modules", "is not the name of a package"),
        ("@scope", "is not the name of a package"),
        ("axios@", "has no version after the @"),
        ("axios@^^1", "is not a range of versions"),
        ("axios@>=2 <1", "no version is in the range"),
        ("node@20", "is the runtime itself; say it in nodejs.version"),
    ],
)
def test_node_dependencies_are_names_and_ranges_alone(entry: str, problem: str) -> None:
    found = wrong(f"nodejs:\n  dependencies:\n    - '{entry}'\n")
    assert found.startswith("5:7: nodejs.dependencies[0]: ")
    assert problem in found


def test_ordinary_packages_are_let_through() -> None:
    text = HEAD + (
        "python:\n  dependencies:\n"
        "  - numpy\n  - pandas>=2.2,<3\n  - requests[socks]==2.32.*\n  - tool~=1.0; python_version < '3.13'\n"
        "  - tool~=2.0; python_version >= '3.13'\n"
        "nodejs:\n  dependencies:\n"
        "  - axios\n  - express@^4.18 || ^5\n  - '@scope/name@2.x'\n  - typescript@latest\n  - vite@>=5 <7\n"
    )
    assert told(text) == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/proc", "does not lie below /workspace"),
        ("/", "does not lie below /workspace"),
        ("/workspace", "does not lie below /workspace"),
        ("/workspace/../etc", "does not lie below /workspace"),
        ("/workspacex/a", "does not lie below /workspace"),
        ("//workspace/a", "does not lie below /workspace"),
        ("/workspace/a//b", "is not a plain path; write it as /workspace/a/b"),
        ("/workspace/hive", "is Skep's own"),
        ("/workspace/hive/MEMORY.md", "is Skep's own"),
        ("/workspace/.venv/bin", "is Skep's own"),
        ("workspace/a", "is not an absolute path"),
        ("~/a", "is not an absolute path"),
        ("/workspace/" + "a" * 256, "is not a usable path"),
    ],
)
@pytest.mark.parametrize("field", ["read_only_paths", "writable_paths"])
def test_paths_lie_in_the_workspace_and_are_nobody_elses(field: str, path: str, problem: str) -> None:
    found = wrong(f"security:\n  {field}:\n    - '{path}'\n")
    assert found.startswith(f"5:7: security.{field}[0]: ")
    assert problem in found


def test_a_path_is_not_both_read_only_and_writable() -> None:
    found = wrong("security:\n  read_only_paths: [/workspace/a]\n  writable_paths: [/workspace/a]\n")
    assert found.startswith("5:20: security.writable_paths[0]: '/workspace/a' is among the read-only paths too")


@pytest.mark.parametrize("host", ["10.0.0.1", "0x7f.1", "*", "*.org", "a..b", "host:0", "host:99999", "http://a.org"])
def test_domains_are_those_that_the_way_out_understands(host: str) -> None:
    found = wrong(f"security:\n  network: allowed\n  allowed_domains:\n    - '{host}'\n")
    assert found.startswith("6:7: security.allowed_domains[0]: ")


def test_the_same_domain_in_two_spellings_is_noticed() -> None:
    found = wrong("security:\n  network: allowed\n  allowed_domains: [example.org, EXAMPLE.org.]\n")
    assert "allowed_domains[1]: says the same as allowed_domains[0]" in found


@pytest.mark.parametrize(
    "version", ["3", "3.10", "3.12", "3.12.4", "'>=3.11'", "'>=3.11,<3.14'", "~=3.11", "==3.12.*", "'!=3.12.1'"]
)
def test_the_python_that_is_wanted_may_be_written_without_quotes(version: str) -> None:
    template = review(f"{HEAD}python: {{version: {version}}}\n".encode()).template
    assert template is not None
    assert template.python is not None
    assert template.python.version == version.strip("'")


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("snake", "'snake' is not a version of Python; write \"3.12\""),
        ("''", "'' is not a version of Python"),
        ("-3", "'-3' is not a version of Python"),
        ("3.11 || 3.12", "'3.11 || 3.12' is not a version of Python"),
        ("2.7", "'2.7' is not a version of Python"),
        ("'>=4'", "no Python 3 fits '>=4'"),
        ("'>=3.12,<3.11'", "no Python 3 fits '>=3.12,<3.11'"),
    ],
)
def test_a_python_that_cannot_be_is_refused(version: str, problem: str) -> None:
    assert wrong(f"python:\n  version: {version}\n").startswith(f"4:3: python.version: {problem}")


@pytest.mark.parametrize("version", ["18", "20.x", "'>=18'", "^20.1.0", "18 || 20", "'18 - 20'", "20.11.1"])
def test_the_node_that_is_wanted_is_a_range(version: str) -> None:
    assert told(f"{HEAD}nodejs: {{version: {version}}}\n") == []


@pytest.mark.parametrize("version", ["lts", "'>18 <17'", "18 |", "1.2.3.4"])
def test_a_node_that_cannot_be_is_refused(version: str) -> None:
    assert wrong(f"nodejs:\n  version: {version}\n").startswith("4:3: nodejs.version: ")


def test_a_field_without_a_value_is_empty_and_not_wrong() -> None:
    template = review(
        f"{HEAD}description:\npython:\nnodejs:\n  version:\n  dependencies:\nsecurity:\n".encode()
    ).template
    assert template is not None
    assert template.python is not None
    assert template.nodejs is not None
    assert (template.description, template.nodejs.version, template.nodejs.dependencies) == ("", None, ())


@pytest.mark.parametrize("head", ["", "version: 1\n", "name: garden\n", "version:\nname:\n"])
def test_what_is_required_is_named(head: str) -> None:
    found = told(head + "description: x\n")
    missing = [name for name in ("version", "name") if not re.search(f"^{name}: .", head, re.MULTILINE)]
    assert [problem.split(": ")[1] for problem in found] == missing
    assert all("is required" in problem for problem in found)


@pytest.mark.parametrize("version", ["2", "'1'", "1.0", "true"])
def test_another_version_of_the_format_is_refused(version: str) -> None:
    (found,) = told(f"version: {version}\nname: garden\n")
    assert "and this Skep reads templates of version 1; write version: 1, or bring Skep up to date" in found


@pytest.mark.parametrize("name", ["../../etc", "a/b", ".hidden", "Upper", "a b", "", "-x", "a" * 64, "é"])
def test_a_name_cannot_lead_elsewhere(name: str) -> None:
    assert ": name: this is not a valid name" in told(f"version: 1\nname: '{name}'\n")[0]
    assert ": extends: this is not a valid name" in wrong(f"extends: '{name}'\n")


def test_the_name_is_that_of_the_file() -> None:
    assert told(HEAD, "garden") == []
    (found,) = told(HEAD, "orchard")
    assert found == (
        "2:1: name: is garden, and the file is called 'orchard'; write name: orchard, or call the file garden.yaml"
    )


def test_a_flood_of_mistakes_is_cut_short() -> None:
    found = told(HEAD + "".join(f"x{number}: 1\n" for number in range(500)))
    assert len(found) == 101
    assert found[-1] == "103:1: 400 more problems from here on"


def test_the_fields_of_each_part_are_known_by_their_path() -> None:
    assert fields_at(("python",)) == ["version", "dependencies"]
    assert fields_at(())[:2] == ["version", "name"]


WORDS = [
    *("version: 1", "name: x", "python:", "  dependencies:", "    - ", "nodejs: ", "security: ", "1e9", "~", "é"),
    *("*a", "&a ", "!!x ", "<<: ", "[", "]", "{", "}", ": ", "- ", "? ", "'", '"', "|", ">", "#", "\\"),
    *("\t", "\n", "\r\n", "---\n", "...\n", "%YAML 1.2\n", "\x00", "\u2028"),
]
written = st.lists(st.sampled_from(WORDS), max_size=40).map(lambda parts: "".join(parts).encode())


@given(st.one_of(st.binary(max_size=200), written))
def test_whatever_is_in_the_file_is_judged_and_never_breaks_the_judge(content: bytes) -> None:
    found = review(content)
    assert (found.template is None) is bool(found.problems)
    lines = content.count(b"\n") + 1
    assert all(1 <= problem.line <= lines and problem.column >= 1 for problem in found.problems)
