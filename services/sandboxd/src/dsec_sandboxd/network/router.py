"""The node's router: a network namespace between its sandboxes and whatever else there is.

Everything here blocks for as long as the kernel takes, tenths of a millisecond, and is called from
one thread only, which lives in that namespace. The namespace is kept under a path, so that its
rules stay in force while no daemon runs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.network_policy import Address
from dsec_sandboxd.network import links, namespaces, tracking
from dsec_sandboxd.network import nftables as nft
from dsec_sandboxd.network.netlink import NETLINK_NETFILTER, Netlink, attribute
from dsec_sandboxd.network.plan import (
    DEVICE_INDEX_BASE,
    DEVICE_PREFIX,
    INSIDE_INDEX,
    INSIDE_NAME,
    LOG_GROUP,
    AddressPlan,
    Port,
    Rules,
)
from dsec_sandboxd.network.policy import unsupported
from dsec_sandboxd.network.way_outside import WayOutside

_DNS: Final = 53
_TCP_BACKLOG: Final = 128
_LOG_CONFIG: Final = 4 << 8 | 1
#: A message of refusals leaves the kernel after this many hundredths of a second.
_LOG_DELAY_CS: Final = 5
_RECEIVE_BUFFER_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ResolverSockets:
    """Where the sandboxes' queries come in: UDP and listening TCP sockets, of both families."""

    udp: tuple[socket.socket, ...]
    tcp: tuple[socket.socket, ...]

    def close(self) -> None:
        """Close all. Idempotent."""
        for one in (*self.udp, *self.tcp):
            one.close()


class Router:
    """The namespace, its table and its devices.

    Args:
        kept_at: the path under which the namespace outlives the daemon.
        node: names what is on the host's side.
        plan: who has which address.
        rules: what the table says.
    """

    def __init__(self, kept_at: Path, node: str, plan: AddressPlan, rules: Rules) -> None:
        self._path = kept_at
        self._node = node
        self._plan = plan
        self._rules = rules
        self._outside: WayOutside | None = None
        self._host_fd = -1
        self._routes: Netlink | None = None
        self._table: Netlink | None = None

    # --- Starting and ending ------------------------------------------------------------------

    def open(self, ports: Iterable[Port]) -> None:
        """Move the calling thread into the namespace, with the table and ``ports`` in force.

        What the namespace of an earlier daemon holds besides is removed; the change of the rules
        is one step, so that those sandboxes are never without theirs.

        Raises:
            DsecError: ``unsupported`` when this host lacks what it takes; then nothing stays.
        """
        self._host_fd = namespaces.open_own()
        self._outside = WayOutside(self._node, self._plan, self._host_fd)
        try:
            self._enter()
            self._routes = links.route_socket()
            self._table = nft.rules_socket()
            self._install(list(ports))
        except (OSError, DsecError) as error:
            self.close(keep=False)
            raise _unsupported(error) from error

    def _enter(self) -> None:
        if not Path("/proc/sys/net/ipv6").is_dir():
            raise unsupported("its kernel has IPv6 switched off, whose rules could not be kept")
        if namespaces.is_kept_at(self._path):
            kept = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                namespaces.enter(kept)
            finally:
                os.close(kept)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        namespaces.enter_new()
        namespaces.keep_at(self._path)
        with links.route_socket() as routes:
            addresses = [
                links.add_address(links.LOOPBACK_INDEX, address, address.max_prefixlen)
                for address in self._plan.resolver
            ]
            routes.send([links.bring_up(links.LOOPBACK_INDEX), *addresses], "the router's address")
        for name, value in (
            ("ipv4/ip_forward", "1"),
            ("ipv6/conf/all/forwarding", "1"),
            ("ipv4/conf/all/rp_filter", "1"),
            ("ipv4/conf/default/rp_filter", "1"),
            ("ipv4/conf/all/accept_redirects", "0"),
            ("ipv4/conf/all/send_redirects", "0"),
            ("ipv4/conf/default/send_redirects", "0"),
            ("ipv6/conf/all/accept_redirects", "0"),
        ):
            # Seen from a thread, this tree is that of the thread's own namespace.
            Path("/proc/sys/net", name).write_text(value)

    def _install(self, ports: list[Port]) -> None:
        routes, table = self._require()
        known = {port.device for port in ports}
        stale = [
            links.remove_link(index)
            for name, index in links.link_names(routes).items()
            if name.startswith(DEVICE_PREFIX) and name not in known
        ]
        if stale:
            routes.send(stale, "the removal of what an earlier daemon left")
        own_table = self._rules.table
        requests = [own_table.add(), own_table.delete(), *self._rules.base(())]
        for port in ports:
            requests += self._rules.attach(port)
        nft.commit(table, requests)
        tracking.forget_closed_ones_soon()

    def connect_outside(self, uplink: str) -> None:
        """Lead on to a device of the host; empty for nowhere, also if an earlier daemon did.

        Raises:
            DsecError: ``unsupported`` with what is missing; then it leads nowhere.
        """
        routes, _ = self._require()
        assert self._outside is not None  # noqa: S101  it is open
        try:
            if uplink:
                self._outside.connect(uplink, routes)
            else:
                self._outside.disconnect()
        except (OSError, DsecError) as error:
            raise _unsupported(error) from error

    def close(self, *, keep: bool) -> None:
        """Leave the namespace; unless it is to be kept, all of it goes. Idempotent."""
        for open_socket in (self._routes, self._table):
            if open_socket is not None:
                open_socket.close()
        self._routes = self._table = None
        if self._host_fd < 0:
            return
        namespaces.enter(self._host_fd)
        outside, self._outside = self._outside, None
        assert outside is not None  # noqa: S101  as long as the host's namespace is known
        if keep:
            outside.leave()
        else:
            with contextlib.suppress(OSError):
                outside.disconnect()
            with contextlib.suppress(OSError):
                namespaces.let_go_of(self._path)
        os.close(self._host_fd)
        self._host_fd = -1

    # --- Sandboxes ----------------------------------------------------------------------------

    def prepare(self, port: Port) -> None:
        """Put the rules of a sandbox's device in force, ahead of the device."""
        nft.commit(self._require()[1], self._rules.attach(port))

    def connect(self, port: Port, namespace_fd: int) -> None:
        """Connect a sandbox's namespace to the router: its device, addresses and routes.

        The device goes with the namespace: removing one by itself costs tens of milliseconds, the
        kernel's own end of many namespaces not much more.

        Raises:
            DsecError: what the kernel refused.
        """
        addresses = self._plan.addresses(port.number)
        self._add_device(port, namespace_fd, addresses)
        with namespaces.make_in(namespace_fd, links.route_socket) as inside:
            inside.send(
                [
                    links.bring_up(INSIDE_INDEX),
                    *(
                        links.add_address(INSIDE_INDEX, address, address.max_prefixlen)
                        for address in addresses
                    ),
                    *(links.add_route(INSIDE_INDEX, links.everything(one)) for one in addresses),
                ],
                "a sandbox's addresses",
            )

    def _add_device(self, port: Port, namespace_fd: int, addresses: tuple[Address, ...]) -> None:
        routes, _ = self._require()
        requests = [
            links.add_pair(port.device, port.index, INSIDE_NAME, INSIDE_INDEX, namespace_fd),
            links.bring_up(port.index),
            *(links.add_route(port.index, _alone(address)) for address in addresses),
        ]
        operation = "a sandbox's network device"
        try:
            routes.send(requests, operation)
        except DsecError:
            # The one before with this number may be on its way out still, or a daemon that died has
            # connected the sandbox already.
            with contextlib.suppress(DsecError):
                routes.send([links.remove_link(port.index)], operation)
            with (
                contextlib.suppress(DsecError),
                namespaces.make_in(namespace_fd, links.route_socket) as inside,
            ):
                inside.send([links.remove_link(INSIDE_INDEX)], operation)
            routes.send(requests, operation)

    def detach(self, port: Port) -> None:
        """Remove a sandbox's rules and connections; nothing passes its device any more."""
        _, table = self._require()
        nft.commit(table, self._rules.detach(port))
        table.send([tracking.forgetting(port.number)], "the removal of a sandbox's connections")

    def change(self, before: Port, after: Port) -> None:
        """Put a sandbox under another policy, in one step."""
        nft.commit(self._require()[1], self._rules.change(before, after))

    def learn(self, port: Port, found: list[tuple[int, Address, float]]) -> None:
        """Allow addresses of names for a while."""
        nft.commit(self._require()[1], self._rules.learn(port, found))

    def denied_packets(self, port: Port) -> int:
        """Return how many packets of a sandbox have been refused."""
        counter = self._rules.counter(port)
        return self._rules.table.read_counter(self._require()[1], counter)

    def set_node_addresses(self, now: set[Address]) -> None:
        """Take note of the addresses that the node has now, in one step."""
        nft.commit(self._require()[1], self._rules.node_addresses(now))

    # --- Sockets of the namespace -------------------------------------------------------------

    def resolver_sockets(self) -> ResolverSockets:
        """Return where queries come in; the caller closes them."""
        opened: list[socket.socket] = []
        try:
            for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
                for address in self._plan.resolver:
                    family = socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004
                    one = socket.socket(family, kind | socket.SOCK_NONBLOCK)
                    opened.append(one)
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    one.bind((str(address), _DNS))
                    if kind == socket.SOCK_STREAM:
                        one.listen(_TCP_BACKLOG)
        except BaseException:
            for one in opened:
                one.close()
            raise
        return ResolverSockets(tuple(opened[:2]), tuple(opened[2:]))

    def refusal_socket(self) -> Netlink:
        """Return where the kernel tells of refused packets; the caller closes it."""
        netlink = Netlink(NETLINK_NETFILTER)
        header = struct.pack("=BB", 0, 0) + struct.pack(">H", LOG_GROUP)
        bind = header + attribute(1, b"\1")
        mode = header + attribute(2, struct.pack(">IBB", 0xFFFF, 2, 0))
        mode += attribute(4, struct.pack(">I", _LOG_DELAY_CS))
        try:
            netlink.send([(_LOG_CONFIG, 0, bind), (_LOG_CONFIG, 0, mode)], "a log of refusals")
        except BaseException:
            netlink.close()
            raise
        return netlink

    def _require(self) -> tuple[Netlink, Netlink]:
        if self._routes is None or self._table is None:
            raise unsupported("its router is not open")
        return self._routes, self._table


def device_number(index: int) -> int:
    """Return which sandbox's device an index is, or a negative number."""
    return index - DEVICE_INDEX_BASE


def _unsupported(error: OSError | DsecError) -> DsecError:
    if isinstance(error, OSError):
        return unsupported(f"{error.strerror or error}")
    return error if error.code is ErrorCode.UNSUPPORTED else unsupported(error.message)


def _alone(address: Address) -> links.Network:
    return ipaddress.ip_network(address)
