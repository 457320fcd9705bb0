"""The events of a task come as they happen, and whoever was cut off misses and repeats nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from tests.gateway.served import DEADLINE_S, Served

PROMPT = "/api/hives/garden/prompt"


@dataclass(frozen=True, slots=True)
class Message:
    """One server-sent event."""

    id: int
    event: str
    data: dict[str, Any]


def messages(response: httpx.Response) -> Iterator[Message]:
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line.startswith(":"):
            continue
        if not line:
            if fields:
                yield Message(int(fields["id"]), fields["event"], json.loads(fields["data"]))
            fields = {}
            continue
        name, _, value = line.partition(":")
        assert name not in fields, "an event has each field once"
        fields[name] = value.removeprefix(" ")


def follow(client: httpx.Client, task: str, *, last: int | None = None, most: int | None = None) -> list[Message]:
    """Return what a stream sends after an id, up to its end or up to a number of messages, when it is cut."""
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    found: list[Message] = []
    with client.stream("GET", f"/api/tasks/{task}/events", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        for message in messages(response):
            found.append(message)
            if len(found) == most:
                break
    return found


def begin(client: httpx.Client, prompt: str) -> str:
    task: str = client.post(PROMPT, json={"prompt": prompt, "thread": f"api:{prompt}"}).json()["id"]
    return task


def test_a_stream_has_the_whole_task_and_ends_with_it(client: httpx.Client, served: Served) -> None:
    task = begin(client, "count for the stream")
    sent = follow(client, task)
    assert (sent[0].event, sent[-1].event) == ("prompted", "task_ended")
    assert {"classified", "proposed", "ruled", "observed", "replied"} <= {one.event for one in sent}
    listed = served.home.done("events", "list", "garden", "--after", str(sent[0].id - 1), "--json")
    ours = [record for record in map(json.loads, listed.splitlines()) if record["task"] == task][: len(sent)]
    assert [one.data for one in sent] == ours
    assert [one.id for one in sent] == [record["seq"] for record in ours]


def test_a_stream_that_was_cut_anywhere_goes_on_without_gap_or_repetition(client: httpx.Client) -> None:
    task = begin(client, "count in pieces")
    pieces: list[Message] = []
    while not pieces or pieces[-1].event != "task_ended":  # cut again and again while it runs
        pieces += follow(client, task, last=pieces[-1].id if pieces else None, most=2)
    whole = follow(client, task)
    assert [one.id for one in pieces] == [one.id for one in whole]
    for number, cut in enumerate(whole[:-1]):
        assert follow(client, task, last=cut.id) == whole[number + 1 :]
    assert follow(client, task, last=whole[-1].id) == []


def test_a_client_that_reads_nothing_does_not_hold_up_another(client: httpx.Client, served: Served) -> None:
    task = begin(client, "count twice over")
    with served.client(served.home.token()) as idle, idle.stream("GET", f"/api/tasks/{task}/events"):
        assert follow(client, task)[-1].event == "task_ended"


def test_the_stream_of_a_running_task_ends_when_the_server_does_not(client: httpx.Client) -> None:
    task = begin(client, "sleep 300.5")
    with client.stream("GET", f"/api/tasks/{task}/events", timeout=DEADLINE_S) as response:
        for message in messages(response):
            if message.event == "ruled":
                client.post(f"/api/tasks/{task}/cancel")
        assert (message.event, message.data["body"]["status"]) == ("task_ended", "cancelled")
