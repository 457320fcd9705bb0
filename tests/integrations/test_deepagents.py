"""deepagents works in Skep's sandboxes: an agent from prompt to reply, and each operation on files by itself."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deepagents import create_deep_agent
from deepagents.backends.protocol import SandboxBackendProtocol
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from skep import Limits
from skep.integrations.deepagents import SkepBackend
from skep.sandbox.blocking import wait


@pytest.fixture(scope="module")
def backend() -> Iterator[SkepBackend]:
    with SkepBackend() as made:
        yield made


@pytest.fixture
def place(backend: SkepBackend, request: pytest.FixtureRequest) -> str:
    """Give a folder of the test's own inside."""
    folder = f"/workspace/{request.node.name}"
    backend.execute(f"mkdir '{folder}'")
    return folder


class Script(GenericFakeChatModel):
    """A model that says what it is told to."""

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self


def call(tool: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": tool, "args": arguments, "id": f"{tool}-{len(str(arguments))}"}])


SCRIPT = [
    call("write_file", file_path="/workspace/bees.py", content="print('a hive of', 6 * 7)\n"),
    call("execute", command="python3 bees.py; echo oops >&2; exit 3"),
    call("edit_file", file_path="/workspace/bees.py", old_string="hive", new_string="skep"),
    call("grep", pattern="skep", path="/workspace", output_mode="content"),
    call("glob", pattern="*.py", path="/workspace"),
    call("ls", path="/workspace"),
    call("read_file", file_path="/workspace/bees.py"),
]
SAID = [
    "bees.py",
    "a hive of 42\noops",
    "1 instance",
    "a skep of",
    "/workspace/bees.py",
    "/workspace/bees.py",
    "a skep of",
]


def test_an_agent_writes_runs_edits_and_finds_files_from_prompt_to_reply() -> None:
    with SkepBackend() as backend:
        agent = create_deep_agent(Script(messages=iter([*SCRIPT, AIMessage("done")])), backend=backend)
        messages = agent.invoke({"messages": [{"role": "user", "content": "Write a script, run it, improve it."}]})[
            "messages"
        ]
    observed = [message.content for message in messages if message.type == "tool"]
    assert [said in seen for said, seen in zip(SAID, observed, strict=True)] == [True] * len(SAID), observed
    assert messages[-1].content == "done"


async def test_an_agent_does_the_same_asynchronously() -> None:
    backend = SkepBackend()
    agent = create_deep_agent(Script(messages=iter([*SCRIPT, AIMessage("done")])), backend=backend)
    reply = await agent.ainvoke({"messages": [{"role": "user", "content": "Write a script, run it, improve it."}]})
    observed = [message.content for message in reply["messages"] if message.type == "tool"]
    assert all(said in seen for said, seen in zip(SAID, observed, strict=True)), observed
    await backend.aclose()


def test_the_backend_is_one_for_commands_with_an_id(backend: SkepBackend) -> None:
    assert isinstance(backend, SandboxBackendProtocol)
    assert backend.id == backend.id != ""


def test_a_command_has_its_own_computer(backend: SkepBackend) -> None:
    assert backend.execute("pwd; id -un; cat /etc/hostname").output == "/workspace\nagent\nskep\n"
    assert backend.execute("exit 7").exit_code == 7
    broken = backend.execute("echo 'never closed")
    assert broken.exit_code != 0 and "unexpected EOF" in broken.output


def test_a_command_out_of_time_is_ended_with_what_it_had_printed(backend: SkepBackend) -> None:
    late = backend.execute("echo begun; sleep 3600", timeout=1)
    assert (late.exit_code, late.output.splitlines()[0]) == (124, "begun")
    assert backend.execute("ps aux | grep -c '[s]leep 3600'").output == "0\n"


def test_a_command_that_never_stops_printing_is_ended(backend: SkepBackend) -> None:
    endless = backend.execute("yes")
    assert endless.truncated
    assert len(endless.output) == 10 << 20


def test_text_is_read_in_pages(backend: SkepBackend, place: str) -> None:
    path = f"{place}/lines"
    assert backend.write(path, "".join(f"line {number}\n" for number in range(10))).error is None
    page = backend.read(path, offset=3, limit=2)
    assert page.file_data is not None and page.file_data["content"] == "line 3\nline 4\n"
    assert (page.start_line, page.end_line, page.total_lines, page.next_offset) == (4, 5, 10, 5)
    assert "exceeds" in (backend.read(path, offset=10).error or "")


def test_a_file_too_big_to_hold_is_read_in_pages_too(backend: SkepBackend, place: str) -> None:
    backend.execute(f"seq 1 2000000 > {place}/numbers")  # 14 MB
    page = backend.read(f"{place}/numbers", offset=1_999_990, limit=3)
    assert page.file_data is not None and page.file_data["content"].split() == ["1999991", "1999992", "1999993"]


@pytest.mark.parametrize("text", ["", "naïve 蜂 🐝\n", "a\r\nb\r\n", "\0 in the middle", "no newline"])
def test_text_of_every_kind_comes_back_as_it_was_written(backend: SkepBackend, text: str) -> None:
    backend.write("/workspace/text kind", text)
    [found] = backend.download_files(["/workspace/text kind"])
    assert found.content == text.encode()


def test_bytes_come_back_as_they_were_uploaded_and_are_read_as_base64(backend: SkepBackend, place: str) -> None:
    data = bytes(range(256)) * 40_000
    [sent] = backend.upload_files([(f"{place}/deep/down/data.bin", data)])
    [found] = backend.download_files([f"{place}/deep/down/data.bin"])
    assert (sent.error, found.error, found.content) == (None, None, data)
    backend.upload_files([(f"{place}/small.bin", b"\xff\x00")])
    shown = backend.read(f"{place}/small.bin").file_data
    assert shown is not None and (shown["encoding"], base64.b64decode(shown["content"])) == ("base64", b"\xff\x00")


def test_what_cannot_be_moved_is_named_and_the_rest_is_moved(backend: SkepBackend, place: str) -> None:
    sent = backend.upload_files([("relative", b""), (place, b""), ("/usr/bin/true", b""), (f"{place}/ok", b"ok")])
    assert [response.error for response in sent] == ["invalid_path", "is_directory", "permission_denied", None]
    got = backend.download_files(["relative", place, f"{place}/none", f"{place}/ok"])
    assert [response.error for response in got] == ["invalid_path", "is_directory", "file_not_found", None]
    assert got[-1].content == b"ok"


def test_an_edit_must_say_which_place_it_means(backend: SkepBackend, place: str) -> None:
    path = f"{place}/poem"
    backend.write(path, "bee\nbee\n")
    assert "2 times" in (backend.edit(path, "bee", "wasp").error or "")
    assert "not found" in (backend.edit(path, "ant", "wasp").error or "")
    assert "empty" in (backend.edit(path, "", "wasp").error or "")
    everywhere = backend.edit(path, "bee", "蜂", replace_all=True)
    assert (everywhere.error, everywhere.occurrences) == (None, 2)
    assert backend.execute(f"cat {path}").output == "蜂\n蜂\n"
    assert "No such file" in (backend.edit(f"{place}/none", "a", "b").error or "")
    backend.upload_files([(path, b"\xff")])
    assert "not a text file" in (backend.edit(path, "a", "b").error or "")


def test_an_edit_keeps_the_line_ends_and_the_mode_of_the_file(backend: SkepBackend, place: str) -> None:
    path = f"{place}/dos.sh"
    backend.write(path, "one\r\ntwo\r\nthree\r\n")
    backend.execute(f"chmod 750 {path}")
    assert backend.edit(path, "one\ntwo", "1\n2").error is None
    [found] = backend.download_files([path])
    assert found.content == b"1\r\n2\r\nthree\r\n"
    assert backend.execute(f"stat -c %a {path}").output == "750\n"


async def test_edits_at_the_same_time_all_count(backend: SkepBackend, place: str) -> None:
    names = [f"<{number}>" for number in range(20)]
    await backend.awrite(f"{place}/many", " ".join(names))
    edits = [backend.aedit(f"{place}/many", name, "done") for name in names]
    assert [result.error for result in await asyncio.gather(*edits)] == [None] * 20
    assert (await backend.aexecute(f"cat {place}/many")).output == " ".join(["done"] * 20)


def test_links_are_followed_written_through_and_removed_themselves(backend: SkepBackend, place: str) -> None:
    backend.execute(
        f"cd {place}; mkdir real; echo old > real/file; ln -s real/file link; ln -s nothing broken; ln -s real way"
    )
    assert backend.edit(f"{place}/link", "old", "new").error is None
    assert backend.write(f"{place}/way/other", "through").error is None
    assert backend.execute(f"cd {place}; cat real/file real/other; readlink link").output == "new\nthroughreal/file\n"
    kinds = {info["path"].rpartition("/")[2]: info["is_dir"] for info in backend.ls(place).entries or []}
    assert kinds == {"real": True, "link": False, "broken": False, "way": True}
    assert backend.delete(f"{place}/way").error is None
    assert backend.execute(f"cat {place}/real/file").output == "new\n"
    assert "No such file" in (backend.read(f"{place}/broken").error or "")


def test_what_is_missing_is_said_to_be(backend: SkepBackend, place: str) -> None:
    assert "No such file" in (backend.ls(f"{place}/none").error or "")
    assert "Not a directory" in (backend.ls("/etc/hostname").error or "")
    assert "No such file" in (backend.read(f"{place}/none").error or "")
    assert "Is a directory" in (backend.read(place).error or "")
    assert "No such file" in (backend.delete(f"{place}/none").error or "")
    assert "Read-only" in (backend.write("/usr/x", "").error or "") or "denied" in (
        backend.write("/usr/x", "").error or ""
    )


def test_text_is_found_by_grep_whatever_the_file_is_called(backend: SkepBackend, place: str) -> None:
    for name in ("a.py", "b.txt", "odd 'name' 蜂.py", "deep/c.py"):
        backend.write(f"{place}/{name}", "first\nx = 'honey.*' # 蜜\n")
    backend.upload_files([(f"{place}/blob", b"\0honey.*")])
    found = backend.grep("honey.*", place)
    assert {(match["path"].removeprefix(place + "/"), match["line"]) for match in found.matches or []} >= {
        ("a.py", 2), ("b.txt", 2), ("odd 'name' 蜂.py", 2), ("deep/c.py", 2),
    }  # fmt: skip
    assert {match["path"] for match in backend.grep("蜜", place, "*.txt").matches or []} == {f"{place}/b.txt"}
    capped = backend.grep("honey", place, max_count=2)
    assert len(capped.matches or []) == 2 and capped.truncated
    assert backend.grep("wax", place).matches == []


def test_files_are_found_by_glob_below_the_workspace(backend: SkepBackend, place: str) -> None:
    for name in ("top.py", "src/app/main.py", "src/app/notes.md"):
        backend.write(f"{place}/{name}", "")
    assert {found["path"] for found in backend.glob("*.py", place).matches or []} == {
        f"{place}/top.py", f"{place}/src/app/main.py",
    }  # fmt: skip
    assert [found["path"] for found in backend.glob("src/**/*.md", place).matches or []] == [
        f"{place}/src/app/notes.md"
    ]
    assert f"{place}/top.py" in {found["path"] for found in backend.glob("top.py").matches or []}


def test_a_folder_of_the_host_is_the_workspace_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    with SkepBackend(folder, env={"GREETING": "hi"}, limits=Limits(processes=64)) as backend:
        assert backend.execute("echo $GREETING > note; cat note").output == "hi\n"
    assert (folder / "note").read_text() == "hi\n"


def test_where_a_sandbox_was_lost_the_next_command_has_another(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    with SkepBackend(folder) as backend:
        backend.write("/workspace/note", "kept")
        first = backend.id
        threading.Timer(0.5, lambda: wait(lost(backend))).start()
        assert "the sandbox died" in backend.execute("sleep 3600").output
        assert backend.execute("cat note").output == "kept"
        assert backend.id != first


async def lost(backend: SkepBackend) -> None:
    await (await backend._standby.sandbox()).stop()


def test_a_sandbox_without_a_network_reaches_nothing(backend: SkepBackend) -> None:
    tried = backend.execute("python3 -c \"import socket; socket.create_connection(('192.0.2.1', 80), 2)\"")
    assert tried.exit_code != 0 and "unreachable" in tried.output
