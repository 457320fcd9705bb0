"""What uv and npm have chosen is read without trust: code of a package may have run beside them."""

from __future__ import annotations

import json

import pytest

from skep.errors import PackageRefused
from skep.workspace.snapshot.resolution import Resolution, read_pylock, requirements

_HASH = "ab" * 32


def pylock(name: str = "apple", version: str = "1.0", digest: str = _HASH, kind: str = "sha256") -> str:
    fields = {"name": name, "version": version}
    head = "\n".join(f"{field} = {json.dumps(value)}" for field, value in fields.items())
    return f"[[packages]]\n{head}\nwheels = [{{ url = 'x', hashes = {{ {kind} = {json.dumps(digest)} }} }}]\n"


def test_a_choice_becomes_one_line_with_its_hashes() -> None:
    chosen = read_pylock(pylock())
    assert requirements(chosen) == f"apple==1.0 --hash=sha256:{_HASH}\n".encode()


@pytest.mark.parametrize(
    "text",
    [
        pylock(name="apple\n--index-url http://evil.test"),
        pylock(name="-e ."),
        pylock(name="apple @ http://evil.test/apple.whl"),
        pylock(version="1.0 --find-links /workspace"),
        pylock(version="1.0\n-r other"),
        pylock(digest="ab --no-verify-hashes"),
        pylock(name=""),
        "[[packages]]\nname = 'apple'\nversion = '1.0'\n",
        "[[packages]]\nwheels = 3\n",
        "packages = 5",
        "packages = [1]",
        "not toml",
    ],
)
def test_a_choice_that_says_more_than_that_is_refused(text: str) -> None:
    with pytest.raises(PackageRefused):
        read_pylock(text)


@pytest.mark.parametrize(
    "lock",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"packages": 3}',
        json.dumps({"packages": {"node_modules/x": {"version": "1", "resolved": "git+ssh://host/x"}}}).encode(),
        json.dumps({"packages": {"node_modules/x": {"version": "1", "resolved": "--flag"}}}).encode(),
        json.dumps({"packages": {"node_modules/x": {"version": "1", "resolved": "file:../x"}}}).encode(),
    ],
)
def test_a_lock_that_leads_elsewhere_or_nowhere_is_refused(lock: bytes) -> None:
    with pytest.raises(PackageRefused):
        Resolution(node_lock=lock).node_files()


def test_the_same_content_from_another_index_is_the_same() -> None:
    def lock(host: str) -> bytes:
        entry = {"version": "1.0.0", "resolved": f"https://{host}/x.tgz", "integrity": "sha512-x"}
        return json.dumps({"packages": {"": {}, "node_modules/x": entry}}).encode()

    assert Resolution(node_lock=lock("a.test")).content() == Resolution(node_lock=lock("b.test")).content()
