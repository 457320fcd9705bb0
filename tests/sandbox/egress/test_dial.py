"""Dialling: only what was pinned or is public. Names are tried in a namespace of their own, in tests/attacks."""

from __future__ import annotations

import socket

import pytest

from skep.sandbox.egress.dial import Unreachable, addresses, dial
from skep.sandbox.egress.policy import parse_policy


async def test_a_pinned_host_is_dialled_where_it_is_pinned() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        policy = parse_policy(["a.test"], upstreams={"a.test": f"127.0.0.1:{port}"})
        with await dial(policy, "a.test", 80) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)
            assert connection.gettimeout() == 0


async def test_a_pin_without_a_port_keeps_the_one_asked_for() -> None:
    policy = parse_policy(["a.test"], upstreams={"a.test": "10.1.2.3", "b.test": "[fd00::1]:81"})
    assert await addresses(policy, "a.test", 8080) == [("10.1.2.3", 8080)]
    assert await addresses(policy, "b.test", 8080) == [("fd00::1", 81)]


async def test_a_host_that_is_down_is_named_without_its_address() -> None:
    policy = parse_policy(["a.test"], upstreams={"a.test": "127.0.0.1:1"})
    with pytest.raises(Unreachable) as refused:
        await dial(policy, "a.test", 80)
    assert str(refused.value) == "a.test:80 does not answer (Connection refused)"
