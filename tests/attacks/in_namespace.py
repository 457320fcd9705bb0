"""Try names that lead where nobody may go, in a network namespace with a name server of its own. Prints JSON.

Run by test_addresses.py as root of new namespaces. Every address leads to a server that says INTERNAL, except in the
trial of rebinding: there only loopback does.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import threading
from ipaddress import ip_address

from skep.sandbox.egress.addresses import is_public
from skep.sandbox.egress.dial import Unreachable, addresses, dial
from skep.sandbox.egress.policy import parse_policy

PORT = 8080


class NameServer:
    """Answers each name with its addresses in turn, the last of them for ever."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.asked: list[str] = []
        self._answers = answers
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(1500)
            labels, at = [], 12
            while size := query[at]:
                labels.append(query[at + 1 : at + 1 + size].decode())
                at += 1 + size
            question, kind = query[12 : at + 5], struct.unpack_from("!H", query, at + 1)[0]
            self._socket.sendto(self._answer(query[:2], question, ".".join(labels), kind), client)

    def _answer(self, number: bytes, question: bytes, name: str, kind: int) -> bytes:
        queue = self._answers.get(name, [])
        record = b""
        if queue and kind == (28 if ":" in queue[0] else 1):
            self.asked.append(name)
            packed = ip_address(queue[0] if len(queue) == 1 else queue.pop(0)).packed
            record = struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(packed)) + packed
        return number + struct.pack("!HHHHH", 0x8180, 1, 1 if record else 0, 0, 0) + question + record


def lead_home(family: int) -> None:
    """Make every address of a family lead to this namespace: `ip route add local default dev lo table local`."""
    scope = 254 if family == socket.AF_INET else 0
    route = struct.pack("=BBBBBBBBI", family, 0, 0, 0, 255, 4, scope, 2, 0) + struct.pack("=HHi", 8, 4, 1)
    message = struct.pack("=IHHII", 16 + len(route), 24, 0x705, 1, 0) + route
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.send(message)
        error = struct.unpack_from("=i", netlink.recv(4096), 16)[0]
        assert error in (0, -17), error


def listen() -> None:
    if sys.argv[1] != "rebinding":
        lead_home(socket.AF_INET)
        lead_home(socket.AF_INET6)
    listener = socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True)

    def serve() -> None:
        while True:
            client, _ = listener.accept()
            with client:
                client.sendall(b"INTERNAL")

    threading.Thread(target=serve, daemon=True).start()


def naive(host: str) -> bool:
    """Check the name's address, then connect to the name: as a proxy would that does not know better."""
    if sys.argv[1] == "rebinding" and not is_public(str(socket.getaddrinfo(host, PORT)[0][4][0])):
        return False
    with socket.create_connection((host, PORT), 3) as connection:
        return connection.recv(64) == b"INTERNAL"


async def ours(host: str) -> tuple[bool, str]:
    policy = parse_policy([f"{host}:{PORT}"])
    try:
        with await dial(policy, host, PORT) as connection:
            connection.setblocking(True)
            return connection.recv(64) == b"INTERNAL", str(await addresses(policy, host, PORT))
    except Unreachable as problem:
        return False, str(problem)


def main() -> None:
    answers: dict[str, list[str]] = json.loads(sys.argv[2])
    server = NameServer(answers)
    listen()
    results = {}
    for host in json.loads(sys.argv[3]):
        before, public = len(server.asked), is_public(answers[host][0])
        through, why = asyncio.run(ours(host))
        asked = len(server.asked) - before
        reached = naive(f"naive-{host}")
        results[host] = {"ours": through, "why": why, "asked": asked, "naive": reached, "public": public}
    print(json.dumps(results))


main()
