"""A picture that a tool yields is a file of the workspace: its path is told, its bytes are read when they are shown."""

from __future__ import annotations

import base64

import pytest
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart
from tests.agent.conftest import Bench, stamp

from skep.agent.conversation import Conversation
from skep.agent.observations import CellRan, FileRead, Observation, PageSeen, pictures_of
from skep.agent.pictures import look
from skep.models.sight import MOST_BYTES, Picture, mark

pytestmark = pytest.mark.asyncio(loop_scope="module")

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


async def test_a_picture_is_read_by_its_path_and_seen_by_its_bytes(bench: Bench) -> None:
    async with (await bench.desk.computer()).files() as files:
        await files.write("shots/bee.dat", PNG)
        await files.write("shots/text.png", "GIF89a is how some files begin")
    seen = await bench.do("read_file", path="shots/bee.dat")
    assert isinstance(seen, FileRead)
    assert (seen.picture, seen.text, seen.note) == ("/workspace/shots/bee.dat", "", "this is image/png")
    text = await bench.do("read_file", path="shots/text.png")
    assert isinstance(text, FileRead) and text.picture is None and text.text.startswith("GIF89a")
    found = await look(bench.desk, ["/workspace/shots/bee.dat"])
    assert found == {"/workspace/shots/bee.dat": Picture("image/png", PNG)}


async def test_what_cannot_be_shown_is_told_with_the_reason(bench: Bench) -> None:
    await bench.do("run_command", command=f"head -c {MOST_BYTES + 1} /dev/zero > huge.png; ln -s /etc/passwd link.png")
    found = await look(bench.desk, ["/workspace/huge.png", "/workspace/none.png", "/workspace/link.png"])
    assert found["/workspace/huge.png"] == "it is larger than 3,500,000 bytes"
    assert found["/workspace/none.png"] == "it is not there any more"
    assert isinstance(found["/workspace/link.png"], str)


@pytest.mark.parametrize(
    ("observation", "paths"),
    [
        (CellRan(stamp=stamp(), outcome="ok", pictures=("/a.png", "/b.png")), ("/a.png", "/b.png")),
        (PageSeen(stamp=stamp(), url="http://x", picture="/shot.png"), ("/shot.png",)),
        (FileRead(stamp=stamp(), path="/a.png", text="", start=1, picture="/a.png"), ("/a.png",)),
        (FileRead(stamp=stamp(), path="/a.txt", text="x", start=1), ()),
    ],
)
async def test_a_conversation_keeps_paths_and_gives_them_up_when_it_is_shortened(
    observation: Observation, paths: tuple[str, ...]
) -> None:
    call = ToolCallPart("some_tool", {}, "call_1")
    talk = Conversation.begin("You are a worker.", "Look.")
    talk.messages.append(ModelResponse(parts=[call]))
    talk.answer(call, observation)
    talk.settle()
    assert pictures_of(observation) == paths
    assert _metadata(talk) == mark(paths)
    talk.compact(keep=0)
    assert _metadata(talk) is None


def _metadata(talk: Conversation) -> object:
    last = talk.messages[-1]
    assert isinstance(last, ModelRequest) and isinstance(last.parts[0], ToolReturnPart)
    return last.parts[0].metadata
