"""What a sandbox without a network reaches of its host's: not a port, not a socket, not an answer.

Each attempt fails; the fixture then checks that host, node and neighbour are as before.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from attack_world import CALL, AttackWorld


async def test_a_scan_for_reachable_mirrors_finds_none(arena: AttackWorld) -> None:
    said = await arena.python(
        """
import collections, errno, socket
found = collections.Counter()
addresses = [f'{net}.{last}' for net in ('10.0.0', '172.17.0', '192.168.1', '169.254.169')
             for last in (1, 2, 100, 254)] + ['1.1.1.1', '8.8.8.8', '::1', 'fe80::1', '2001:db8::1']
for address in addresses:
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    for port in (53, 80, 443, 3128, 4222, 5000, 8080, 9092):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with socket.socket(family, kind) as s:
                s.settimeout(1)
                try: s.connect((address, port)); s.send(b'x'); found['reached'] += address != '::1'
                except OSError as error: found[errno.errorcode[error.errno]] += 1
print(found['reached'], 'ETIMEDOUT' in found)
for port in range(1, 65536):
    with socket.socket() as s:
        # A socket may meet itself, when it is given the number that it asks for.
        if s.connect_ex(('127.0.0.1', port)) == 0 and s.getsockname() != s.getpeername():
            print('open', port)
"""
    )
    assert said == "0 False"


class HostServices:
    """A proxy, a mirror, a name server and two sockets of this host, which count who comes."""

    def __init__(self, directory: Path) -> None:
        self.came = 0
        self._tcp: list[asyncio.Server] = []
        self._transport: asyncio.DatagramTransport | None = None
        self.names = {
            "path": str(directory / "host.sock"),
            "abstract": f"dsec-host-{os.getpid()}",
            "address": _an_address_of_this_host(),
        }

    async def start(self) -> None:
        self._tcp = [
            await asyncio.start_server(self._answer, "0.0.0.0", 0),  # noqa: S104  for whoever comes
            await asyncio.start_unix_server(self._answer, self.names["path"]),
            await asyncio.start_unix_server(self._answer, "\0" + self.names["abstract"]),
        ]
        self.names["http"] = str(self._tcp[0].sockets[0].getsockname()[1])
        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Answering(self),
            local_addr=("0.0.0.0", 0),  # noqa: S104  as above
        )
        self.names["udp"] = str(self._transport.get_extra_info("sockname")[1])

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.came += 1
        await reader.read(1)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nsolution")
        await writer.drain()
        writer.close()

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        for server in self._tcp:
            server.close()
            await server.wait_closed()


class _Answering(asyncio.DatagramProtocol):
    def __init__(self, services: HostServices) -> None:
        self._services = services
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._services.came += 1
        self._transport.sendto(data, addr)


def _an_address_of_this_host() -> str:
    """Return an address by which others reach this host, or its loopback's when none do."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[HostServices]:
    made = HostServices(tmp_path)
    await made.start()
    yield made
    await made.close()


def _fetch(url: str) -> str:
    """Return a line that reads the solution by HTTP, by a proxy if one is named."""
    return f"import urllib.request as u; assert u.urlopen({url!r}, timeout=2).read() == b'solution'"


def _ask(family: str, kind: str, to: str) -> str:
    """Return a line that sends something to a socket and gets an answer."""
    return (
        f"import socket; s = socket.socket(socket.{family}, socket.{kind}); s.settimeout(2);"
        f" s.connect({to}); s.send(b'x'); assert s.recv(100)"
    )


@pytest.mark.parametrize(
    ("line", "variables"),
    [
        (_fetch("http://{address}:{http}/simple/"), {}),
        (_fetch("http://127.0.0.1:{http}/simple/"), {}),
        (_fetch("http://pypi.org/simple/"), {"http_proxy": "http://{address}:{http}"}),
        (_fetch("http://pypi.org/simple/"), {"http_proxy": "http://127.0.0.1:{http}"}),
        (_ask("AF_INET", "SOCK_DGRAM", "('{address}', {udp})"), {}),
        (_ask("AF_INET", "SOCK_DGRAM", "('127.0.0.1', {udp})"), {}),
        (_ask("AF_UNIX", "SOCK_STREAM", "'{path}'"), {}),
        (_ask("AF_UNIX", "SOCK_STREAM", r"'\0{abstract}'"), {}),
    ],
    ids=["mirror", "own mirror", "proxy", "own proxy", "names", "own names", "path", "abstract"],
)
async def test_no_proxy_no_name_server_and_no_socket_of_the_host_answers(
    arena: AttackWorld, services: HostServices, line: str, variables: dict[str, str]
) -> None:
    line = line.format(**services.names)
    env = {name: value.format(**services.names) for name, value in variables.items()}
    result = await arena.run("python3", "-c", line, env=env, timeout_s=20)
    assert result.exit_code == 1, result
    assert b"AssertionError" not in result.stderr
    assert services.came == 0
    # Where they are in reach, they answer: what failed is the way.
    beside = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", line), env={"PATH": os.defpath, **env}
    )
    assert await beside.wait() == 0
    assert services.came == 1


NETWORK = {
    "raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "crypto": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "bluetooth": "socket.socket(31, socket.SOCK_RAW, 1)",
    "xdp": "socket.socket(44, socket.SOCK_RAW)",
    "firewall": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)",
    "audit": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9)",
    "events": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15)",
    "sockets of others": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)",
    "interface": "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sH22x', b'lo', 0))",
    "address": "fcntl.ioctl(socket.socket(), 0x8916, struct.pack('16sH22x', b'lo', 2))",
    "new interface": "fcntl.ioctl(socket.socket(), 0x89a0, b'bridge0'.ljust(16, bytes(1)))",
    "transparent": "socket.socket().setsockopt(0, 19, 1)",
    "marked": "socket.socket().setsockopt(1, 36, 1)",
    "bound to a device": "socket.socket().setsockopt(1, 25, b'eth0')",
    "flow labels": "socket.socket(socket.AF_INET6).setsockopt(41, 32, bytes(32))",
    "forced buffer": "socket.socket().setsockopt(1, 33, 1 << 30)",
}


async def test_the_network_is_nobodys_to_change_from_inside(arena: AttackWorld) -> None:
    tries = "\n".join(f"attempt('{what}', lambda: {how})" for what, how in NETWORK.items())
    said = await arena.python(f"{CALL}\nimport fcntl, socket, struct\n{tries}")
    lines = said.splitlines()
    assert len(lines) == len(NETWORK)
    assert not [line for line in lines if "done" in line], said
