"""Hosts in network namespaces around a node's router, and sandboxes with networks."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from dsec_common.wire.network import NetworkMode, NetworkPolicy, NetworkRule
from dsec_common.wire.sandbox import Limits, SandboxState
from dsec_sandboxd.network import links, namespaces
from dsec_sandboxd.network.networks import Networks
from dsec_sandboxd.network.settings import NetworkSettings
from dsec_sandboxd.network.uplink import MANUAL
from dsec_sandboxd.network.upstreams import Upstream
from dsec_sandboxd.records import SandboxRecord
from kernel_world import World

T = TypeVar("T")

ALLOWED, OTHER, METADATA = "10.9.1.2", "10.9.2.2", "169.254.169.254"
ALLOWED6, OTHER6 = "fd09:1::2", "fd09:2::2"
TCP_PORT, UDP_PORT = 8080, 9090


def in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread of its own, whose namespace nobody else has."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001  told to who asked
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def new_namespace() -> int:
    """Return a fresh network namespace, with its loopback up."""

    def make() -> int:
        namespaces.enter_new()
        with links.route_socket() as routes:
            routes.send([links.bring_up(links.LOOPBACK_INDEX)], "loopback")
        return namespaces.open_own()

    return in_thread(make)


class Host:
    """A host with addresses, behind the router: it echoes by TCP and UDP, and counts both."""

    def __init__(self, number: int, *addresses: str) -> None:
        self.number = number
        self.addresses = [ipaddress.ip_address(text) for text in addresses]
        self.namespace = new_namespace()
        self.connections = 0
        self.datagrams: list[bytes] = []
        self._servers: list[asyncio.Server] = []
        self._transports: list[asyncio.DatagramTransport] = []
        self._writers: set[asyncio.StreamWriter] = set()

    def connect_to(self, router: Path) -> None:
        """Have a device in the router's namespace, and the host behind it."""
        index = 100 + self.number

        def make() -> None:
            kept = os.open(router, os.O_RDONLY)
            try:
                namespaces.enter(kept)
            finally:
                os.close(kept)
            name = f"host{self.number}"
            with links.route_socket() as routes:
                routes.send(
                    [
                        links.add_pair(name, index, "eth0", 5, self.namespace),
                        links.bring_up(index),
                        *(
                            links.add_route(index, ipaddress.ip_network(address))
                            for address in self.addresses
                        ),
                    ],
                    "a host's device",
                )

        in_thread(make)

        def inside() -> None:
            namespaces.enter(self.namespace)
            with links.route_socket() as routes:
                routes.send(
                    [
                        links.bring_up(5),
                        *(
                            links.add_address(5, address, address.max_prefixlen)
                            for address in self.addresses
                        ),
                        links.add_route(5, ipaddress.ip_network("0.0.0.0/0")),
                        links.add_route(5, ipaddress.ip_network("::/0")),
                    ],
                    "a host's addresses",
                )

        in_thread(inside)

    async def serve(self) -> None:
        """Listen on all addresses."""
        for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104
            for kind, port in (
                (socket.SOCK_STREAM, TCP_PORT),
                (socket.SOCK_STREAM, 443),
                (socket.SOCK_DGRAM, UDP_PORT),
            ):
                one = namespaces.make_in(
                    self.namespace,
                    lambda f=family, k=kind: socket.socket(f, k),  # type: ignore[misc]
                )
                one.setblocking(False)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind((any_address, port))
                if kind == socket.SOCK_STREAM:
                    self._servers.append(await asyncio.start_server(self._echo, sock=one))
                else:
                    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                        lambda: _EchoDatagrams(self), sock=one
                    )
                    self._transports.append(transport)

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for transport in self._transports:
            transport.close()
        for server in self._servers:
            await server.wait_closed()
        await asyncio.sleep(0)
        os.close(self.namespace)


class _EchoDatagrams(asyncio.DatagramProtocol):
    def __init__(self, host: Host) -> None:
        self._host = host
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._host.datagrams.append(data)
        self._transport.sendto(data, addr)


class NameServer(asyncio.DatagramProtocol):
    """Answers with what ``names`` says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.ttl = 60
        self.asked: list[str] = []
        self._transport: Any = None

    async def start(self) -> Upstream:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        return Upstream("127.0.0.1", transport.get_extra_info("sockname")[1])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        self.asked.append(name)
        reply = dns.message.make_response(query)
        if name not in self.names:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        wanted = 4 if question.rdtype == dns.rdatatype.A else 6
        known = self.names.get(name, [])
        found = [text for text in known if ipaddress.ip_address(text).version == wanted]
        if found and question.rdtype in {dns.rdatatype.A, dns.rdatatype.AAAA}:
            reply.answer.append(
                dns.rrset.from_text(question.name, self.ttl, "IN", question.rdtype, *found)
            )
        self._transport.sendto(reply.to_wire(), addr)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def allow(*rules: NetworkRule, deny: Sequence[NetworkRule] = (), **sets: bool) -> NetworkPolicy:
    return NetworkPolicy(
        mode=NetworkMode.ALLOW, allow=rules, deny=tuple(deny), rule_sets=dict(sets)
    )


def to(cidr: str, ports: str = "", protocol: str = "") -> NetworkRule:
    return NetworkRule(cidr=cidr, ports=ports, protocol=protocol)


def named(host: str, ports: str = "", protocol: str = "") -> NetworkRule:
    return NetworkRule(host=host, ports=ports, protocol=protocol)


OPEN = NetworkPolicy(mode=NetworkMode.OPEN)
NONE = NetworkPolicy()


def record_of(local: str, network: NetworkPolicy | None = None, **changes: Any) -> SandboxRecord:
    values: dict[str, Any] = {
        "local": local,
        "project": "default",
        "placement_id": "p",
        "request_id": "r",
        "state": SandboxState.RUNNING,
        "created_at": 0.0,
        "layer_references": (),
        "layer_digests": (),
        "limits": Limits(),
        "network": network,
    }
    return SandboxRecord(**values | changes)


@dataclass
class NetworkWorld:
    """A kernel, a router, hosts behind it, and a name server."""

    world: World
    networks: Networks
    directory: Path
    names: NameServer
    settings: NetworkSettings
    hosts: dict[str, Host] = field(default_factory=dict)
    denied: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    records: dict[str, SandboxRecord] = field(default_factory=dict)

    @classmethod
    async def start_without_router(cls, world: World, **settings: Any) -> NetworkWorld:
        """Return one without hosts, whose router is made for the first sandbox."""
        names = NameServer()
        upstream = await names.start()
        denied: list[tuple[str, Mapping[str, str]]] = []
        directory = world.directory / "network"
        given = NetworkSettings(**{"upstreams": (upstream,), "uplink": MANUAL} | settings)
        networks = Networks(
            "test-node",
            world.kernel,
            directory,
            given,
            lambda record, told: denied.append((record.local, told)),
        )
        return cls(world, networks, directory, names, given, denied=denied)

    @classmethod
    async def start(cls, world: World, **settings: Any) -> NetworkWorld:
        made = await cls.start_without_router(world, **settings)
        await made.networks.check(OPEN)
        for number, addresses in enumerate(
            [(ALLOWED, ALLOWED6), (OTHER, OTHER6), (METADATA, "fd00:ec2::254")]
        ):
            host = Host(number, *addresses)
            host.connect_to(made.directory / "router")
            await host.serve()
            made.hosts[addresses[0]] = host
        return made

    async def create(
        self, local: str, network: NetworkPolicy | None = None, **changes: Any
    ) -> SandboxRecord:
        record = record_of(local, network, **changes)
        await self.world.create(local)
        await self.networks.attach(record)
        self.records[local] = record
        return record

    async def destroy(self, local: str) -> None:
        await self.networks.sandbox_ending(local)
        await self.world.kernel.destroy(local)
        self.records.pop(local, None)

    async def close(self) -> None:
        for local in list(self.records):
            await self.destroy(local)
        for host in self.hosts.values():
            await host.close()
        await self.networks.close()
        self.names.close()

    async def try_all(self, local: str, attempts: Sequence[Mapping[str, Any]]) -> list[str]:
        """Make all attempts at once from inside; return ``ok`` or what happened, one for each."""
        text = await self.world.python(
            _PROBE, local=local, env={"ATTEMPTS": json.dumps(list(attempts))}
        )
        return [str(result) for result in json.loads(text)]

    async def reachable(self, local: str, *hosts: str) -> set[str]:
        """Return what of some hosts can be reached from inside by TCP, UDP and ping."""
        attempts = [
            {"kind": kind, "host": host, "port": port}
            for kind, port in (("tcp", TCP_PORT), ("udp", UDP_PORT), ("ping", 0))
            for host in hosts
        ]
        results = await self.try_all(local, attempts)
        return {
            f"{attempt['kind']} {attempt['host']}"
            for attempt, result in zip(attempts, results, strict=True)
            if result == "ok"
        }

    async def tcp(self, local: str, host: str, port: int = TCP_PORT) -> str:
        return (await self.try_all(local, [{"kind": "tcp", "host": host, "port": port}]))[0]

    async def udp(self, local: str, host: str, port: int = UDP_PORT) -> str:
        return (await self.try_all(local, [{"kind": "udp", "host": host, "port": port}]))[0]

    async def ping(self, local: str, host: str) -> str:
        return (await self.try_all(local, [{"kind": "ping", "host": host, "port": 0}]))[0]


_PROBE = """
import errno, json, os, socket, struct
from concurrent.futures import ThreadPoolExecutor
def one(kind, host, port, timeout=5.0):
    try:
        found = socket.getaddrinfo(host, port or None, type=socket.SOCK_STREAM)
        family, address = found[0][0], found[0][4]
        if kind == 'name':
            return ' '.join(sorted({item[4][0] for item in found}))
        if kind == 'tcp':
            with socket.socket(family, socket.SOCK_STREAM) as s:
                s.settimeout(timeout)
                s.connect(address)
                s.sendall(b'hello')
                return 'ok' if s.recv(5) == b'hello' else 'cut'
        if kind == 'udp':
            with socket.socket(family, socket.SOCK_DGRAM) as s:
                s.settimeout(timeout)
                for _ in range(2):
                    s.sendto(b'hello', address)
                return 'ok' if s.recv(5) == b'hello' else 'cut'
        protocol = socket.IPPROTO_ICMP if family == socket.AF_INET else socket.IPPROTO_ICMPV6
        with socket.socket(family, socket.SOCK_DGRAM, protocol) as s:
            s.settimeout(timeout)
            request = 8 if family == socket.AF_INET else 128
            s.sendto(struct.pack('!BBHHH', request, 0, 0, 1, 1) + b'hello', address)
            s.recv(100)
            return 'ok'
    except socket.gaierror as error:
        return 'gai %s' % error.args[0]
    except OSError as error:
        return errno.errorcode.get(error.errno, 'timeout') if error.errno else 'timeout'
with ThreadPoolExecutor(32) as pool:
    attempts = json.loads(os.environ['ATTEMPTS'])
    print(json.dumps(list(pool.map(lambda attempt: one(**attempt), attempts))))
"""
