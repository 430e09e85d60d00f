"""The host's side of the way outside: a pair of devices, a table of ours, and forwarding.

The host's own rules are left alone. All of it is found again by its name, so a later daemon
replaces what one that was killed has left.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec_common.errors import DsecError
from dsec_common.forwarding import Forwarding
from dsec_common.host_side import DEVICE_PREFIX, device_of, digest_of, table_of
from dsec_common.network_policy import Address
from dsec_sandboxd.network import links, namespaces
from dsec_sandboxd.network import nftables as nft
from dsec_sandboxd.network.netlink import Message, Netlink
from dsec_sandboxd.network.plan import UPLINK_NAME, UPLINK_PAIRS, AddressPlan
from dsec_sandboxd.network.policy import unsupported

_UPLINK_INDEX: Final = 900
_FORWARDING_V6: Final = Path("/proc/sys/net/ipv6/conf/all/forwarding")
_TRIES: Final = 64


class WayOutside:
    """The way of one node; the calling thread is in the router's namespace.

    Args:
        node: names what is on the host's side.
        plan: has the addresses of both ends.
        host_fd: the host's namespace; the caller's to close, after this object's last use.
    """

    def __init__(self, node: str, plan: AddressPlan, host_fd: int) -> None:
        self._plan = plan
        self._host_fd = host_fd
        self._device = device_of(node)
        self._table = nft.Table(table_of(node))
        self._first_pair = int(digest_of(node), 16) % UPLINK_PAIRS
        self._forwarding: Forwarding | None = None

    def connect(self, uplink: str, routes: Netlink) -> None:
        """Lead from the router to the host's device ``uplink``, and nowhere else.

        Raises:
            DsecError: ``unsupported`` with what is missing; then nothing of it is left.
        """
        with namespaces.inside(self._host_fd):
            host, table = links.route_socket(), nft.rules_socket()
        with host, table:
            if uplink not in links.link_names(host):
                raise unsupported(f"the uplink {uplink!r} is not a device of this host")
            with contextlib.suppress(DsecError):
                host.send([links.remove_link_named(self._device)], "an earlier uplink")
            try:
                ends = self._pair(routes, host)
                nft.commit(table, self._host_rules(uplink, [here for here, _ in ends]))
                if self._have_the_host_forward(uplink):
                    nft.commit(table, self._rules_of_a_host_that_was_none(uplink))
            except BaseException:
                self.disconnect()
                raise

    def _have_the_host_forward(self, uplink: str) -> bool:
        """Return whether the host forwards on our account only."""
        with namespaces.inside(self._host_fd):
            try:
                own = Path("/proc/sys/net/ipv4/conf", self._device, "forwarding")
                own.write_text("1")
                self._forwarding = Forwarding.take(uplink)
            except OSError as error:
                raise unsupported(
                    f"the host does not route and this process may not have it do so "
                    f"({error.strerror}): set net.ipv4.ip_forward=1"
                ) from error
        return self._forwarding is not None

    def disconnect(self) -> None:
        """Remove all of it, whoever made it. Idempotent."""
        with namespaces.inside(self._host_fd):
            if self._forwarding is not None:
                self._forwarding.let_go()
                self._forwarding = None
            host, table = links.route_socket(), nft.rules_socket()
        with host, table:
            with contextlib.suppress(DsecError):
                host.send([links.remove_link_named(self._device)], "the way outside")
            with contextlib.suppress(DsecError):
                nft.commit(table, [self._table.delete()])

    def leave(self) -> None:
        """Let it be, for the sandboxes that live on and the next daemon. Idempotent."""
        if self._forwarding is not None:
            self._forwarding.leave()
            self._forwarding = None

    # --- The pair -----------------------------------------------------------------------------

    def _pair(self, routes: Netlink, host: Netlink) -> list[tuple[Address, Address]]:
        """Make the pair, with addresses that no other node of this host has; return its ends."""
        failed: DsecError | None = None
        for ends in self._candidates():
            try:
                self._pair_with(routes, host, ends)
            except DsecError as error:
                failed = error
                with contextlib.suppress(DsecError):
                    host.send([links.remove_link_named(self._device)], "a way outside")
                if error.details.get("errno") != errno.EEXIST:
                    raise
            else:
                return ends
        raise unsupported("no addresses are free for its uplink") from failed

    def _candidates(self) -> Iterator[list[tuple[Address, Address]]]:
        """Yield ends, the router's and the host's, of each family that leads anywhere."""
        with namespaces.inside(self._host_fd):
            # A host that does not route IPv6 would swallow packets; so there is no route at all.
            version_6 = _FORWARDING_V6.read_text().strip() == "1"
        for number in range(_TRIES):
            both = self._plan.uplink_ends((self._first_pair + number) % UPLINK_PAIRS)
            yield both if version_6 else both[:1]

    def _pair_with(
        self, routes: Netlink, host: Netlink, ends: list[tuple[Address, Address]]
    ) -> None:
        routes.send(
            [
                links.add_pair(UPLINK_NAME, _UPLINK_INDEX, self._device, 0, self._host_fd),
                links.bring_up(_UPLINK_INDEX),
            ],
            "the way outside",
        )
        index = links.link_names(host)[self._device]
        host.send(
            [
                links.bring_up(index),
                *(links.add_address(index, there, there.max_prefixlen) for _, there in ends),
                *(links.add_route(index, ipaddress.ip_network(here)) for here, _ in ends),
            ],
            "the host's end of the way outside",
        )
        routes.send(
            [
                *(links.add_address(_UPLINK_INDEX, here, here.max_prefixlen) for here, _ in ends),
                *(links.add_route(_UPLINK_INDEX, links.everything(here)) for here, _ in ends),
            ],
            "the router's end of the way outside",
        )

    def _host_rules(self, uplink: str, ours: list[Address]) -> list[Message]:
        table = self._table
        from_us = nft.meta(nft.META_IIFNAME) + nft.compare(nft.interface_name(self._device))
        outside = nft.meta(nft.META_OIFNAME) + nft.compare(nft.interface_name(uplink))
        not_outside = nft.meta(nft.META_OIFNAME) + nft.compare(
            nft.interface_name(uplink), nft.NOT_EQUAL
        )
        to_us = nft.meta(nft.META_OIFNAME) + nft.compare(nft.interface_name(self._device))
        requests = [
            table.add(),
            table.delete(),
            table.add(),
            table.base_chain(
                "forward", "filter", nft.HOOK_FORWARD, nft.PRIORITY_FILTER, drops=False
            ),
            table.base_chain("input", "filter", nft.HOOK_INPUT, nft.PRIORITY_FILTER, drops=False),
            table.base_chain(
                "leave", "nat", nft.HOOK_POSTROUTING, nft.PRIORITY_SOURCE_NAT, drops=False
            ),
            table.rule("forward", from_us, not_outside, nft.DROP),
            table.rule("forward", to_us, nft.in_state("established", "related"), nft.ACCEPT),
            table.rule("forward", to_us, nft.DROP),
            # The router refuses the host's addresses; this holds for one that it has not heard of.
            table.rule("input", from_us, nft.DROP),
        ]
        for address in ours:
            family = nft.IPV4 if address.version == 4 else nft.IPV6  # noqa: PLR2004  IP version 4
            source = nft.of_family(family) + nft.source(address.version)
            source += nft.compare(address.packed)
            requests.append(table.rule("leave", source, outside, nft.MASQUERADE))
        return requests

    def _rules_of_a_host_that_was_none(self, uplink: str) -> list[Message]:
        """Keep what forwards for us from becoming a way through the host for its neighbours.

        What a container engine that starts later publishes (translated) or asked for passes.
        """
        in_and_on = (
            nft.meta(nft.META_IIFNAME)
            + nft.compare(nft.interface_name(uplink))
            + nft.meta(nft.META_OIFNAME)
            + nft.compare(DEVICE_PREFIX.encode(), nft.NOT_EQUAL)
        )
        rule = self._table.rule
        return [
            rule("forward", in_and_on, nft.DESTINATION_TRANSLATED, nft.ACCEPT),
            rule("forward", in_and_on, nft.in_state("established", "related"), nft.ACCEPT),
            rule("forward", in_and_on, nft.DROP),
        ]
