"""A machine of its own with a default route, and what lies behind it: names, and who has them.

The machine is a network namespace that a whole platform runs in; the internet is another one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

from dsec_sandboxd.network import links, namespaces
from network_world import NameServer, in_thread, new_namespace
from stack import Stack

UPLINK = "up0"
MACHINE, MACHINE6 = "192.0.2.1", "fd77::1"
GATEWAY, GATEWAY6 = "192.0.2.2", "fd77::2"
PYPI, PYPI6, OTHER = "198.51.100.7", "2001:db8::7", "198.51.100.8"
PORT = 443


class Outside:
    """The machine's namespace, the internet's, and its servers."""

    def __init__(self) -> None:
        self.machine, self.internet = new_namespace(), new_namespace()
        self.names = NameServer()
        self.names.names = {"pypi.org": [PYPI, PYPI6], "other.example": [OTHER]}
        self.peers: list[str] = []
        self._servers: list[asyncio.Server] = []
        with namespaces.make_in(self.machine, links.route_socket) as routes:
            routes.send([links.add_pair(UPLINK, 7, "eth0", 7, self.internet)], "the uplink")
        _configure(self.internet, (GATEWAY, GATEWAY6), (PYPI, PYPI6, OTHER), gateways=())
        _configure(self.machine, (MACHINE, MACHINE6), (), gateways=(GATEWAY, GATEWAY6))
        in_thread(self._forward_version_6)

    def _forward_version_6(self) -> None:
        namespaces.enter(self.machine)
        Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")

    async def serve(self) -> None:
        """Answer names and echo."""
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(
            lambda: self.names, sock=self._socket(GATEWAY, 53, socket.SOCK_DGRAM)
        )
        for address in (PYPI, PYPI6, OTHER):
            one = self._socket(address, PORT, socket.SOCK_STREAM)
            self._servers.append(await asyncio.start_server(self._echo, sock=one))

    def _socket(self, address: str, port: int, kind: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        one = namespaces.make_in(self.internet, lambda: socket.socket(family, kind))
        one.setblocking(False)
        one.bind((address, port))
        return one

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peers.append(writer.get_extra_info("peername")[0])
        writer.write(await reader.read(100))
        writer.close()

    async def close(self) -> None:
        self.names.close()
        for server in self._servers:
            server.close()
            await server.wait_closed()
        os.close(self.machine)
        os.close(self.internet)

    def devices(self) -> set[str]:
        """Return the machine's devices."""
        with namespaces.make_in(self.machine, links.route_socket) as routes:
            return set(links.link_names(routes))

    def read(self, path: str) -> str:
        """Return what a file of the machine's /proc says."""

        def work() -> str:
            namespaces.enter(self.machine)
            return Path(path).read_text().strip()

        return in_thread(work)


class StackOutside(Stack):
    """A platform on that machine; its command line is the way to it."""

    def __init__(self, directory: Path, outside: Outside, **options: Any) -> None:
        super().__init__(directory, **options)
        self._machine = f"/proc/{os.getpid()}/fd/{outside.machine}"

    def command(self, *arguments: str) -> list[str]:
        return [
            *("nsenter", f"--net={self._machine}"),
            *("env", f"DSEC_SANDBOXD_NETWORK_RESOLVERS={GATEWAY}"),
            *super().command(*arguments),
        ]


def _configure(
    namespace: int, networks: tuple[str, str], alone: tuple[str, ...], gateways: tuple[str, ...]
) -> None:
    def work() -> None:
        namespaces.enter(namespace)
        requests = [links.bring_up(7)]
        for text in (*networks, *alone):
            address = ipaddress.ip_address(text)
            wide = 24 if address.version == 4 else 64
            prefix = address.max_prefixlen if text in alone else wide
            requests.append(links.add_address(7, address, prefix))
        for text in gateways:
            gateway = ipaddress.ip_address(text)
            requests.append(links.add_route(7, links.everything(gateway), gateway))
        with links.route_socket() as routes:
            routes.send(requests, "a host's addresses")

    in_thread(work)
