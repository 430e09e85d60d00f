"""The node's addresses and rules: which sandbox has which, and what the kernel is told. Pure."""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.network_policy import NEVER, Address, Compiled, Destination, Network, Ports
from dsec_common.wire.network import NetworkMode
from dsec_sandboxd.network import nftables as nft
from dsec_sandboxd.network.netlink import Message

SANDBOXES_MAX: Final = 4096
#: Of sandboxes' devices in the router namespace: prefix of names, offset of numbers.
DEVICE_PREFIX: Final = "dsb"
DEVICE_INDEX_BASE: Final = 1000
INSIDE_INDEX: Final = 1000
INSIDE_NAME: Final = "eth0"
UPLINK_NAME: Final = "uplink"
LOG_GROUP: Final = 1
_LOG_BYTES: Final = 64
_FIRST_NUMBER: Final = 4096
#: Ways out that have addresses, of those below the sandboxes'.
UPLINK_PAIRS: Final = 2000
#: Of those set aside for carriers, which nobody uses at home; and of the local ones of IPv6.
_IPV4: Final = ipaddress.IPv4Network("100.96.0.0/16")
_IPV6: Final = ipaddress.IPv6Network("fd64:7365:6300::/64")
_DNS: Final = 53
_QUERIES_PER_S: Final = 200
_LEARNED_MOST: Final = 4096
_NUMBERS: Final = {"tcp": 6, "udp": 17}
_ICMP: Final = ((nft.IPV4, 1), (nft.IPV6, 58))
_FAMILY_OF: Final = {4: nft.IPV4, 6: nft.IPV6}
_BYTES_OF: Final = {4: 4, 6: 16}


@dataclass(frozen=True, slots=True)
class AddressPlan:
    """Two ranges of which the resolver has the first address and each sandbox one of its own."""

    ipv4: ipaddress.IPv4Network = _IPV4
    ipv6: ipaddress.IPv6Network = _IPV6

    @property
    def resolver(self) -> tuple[Address, Address]:
        """The addresses of the node's resolver."""
        return self.ipv4[1], self.ipv6[1]

    def uplink_ends(self, number: int) -> list[tuple[Address, Address]]:
        """Return the addresses of a way out, below ``UPLINK_PAIRS``: the router's end, the host's.

        A pair for each family. Nodes of one host have different ones.
        """
        first = 2 + 2 * number
        return [(self.ipv4[first], self.ipv4[first + 1]), (self.ipv6[first], self.ipv6[first + 1])]

    def addresses(self, number: int) -> tuple[Address, Address]:
        """Return a sandbox's two addresses."""
        return self.ipv4[_FIRST_NUMBER + number], self.ipv6[_FIRST_NUMBER + number]

    def number_of(self, address: Address) -> int:
        """Return whose address it is, or -1."""
        first = self.ipv4[0] if address.version == 4 else self.ipv6[0]  # noqa: PLR2004  IP version 4
        number = int(address) - int(first) - _FIRST_NUMBER
        return number if 0 <= number < SANDBOXES_MAX else -1


class Numbers:
    """Numbers for sandboxes with a network; one that was given back rests as long as possible."""

    def __init__(self) -> None:
        self._free = deque(range(SANDBOXES_MAX))

    def take(self) -> int:
        """Return a free number.

        Raises:
            DsecError: ``exhausted``.
        """
        if not self._free:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"all {SANDBOXES_MAX} addresses of this node are in use: delete a sandbox first",
            )
        return self._free.popleft()

    def claim(self, number: int) -> None:
        """Take one that a sandbox has already."""
        self._free.remove(number)

    def give_back(self, number: int) -> None:
        """Free a number of which nothing is left."""
        self._free.append(number)


@dataclass(slots=True)
class Port:
    """A sandbox's place at the router.

    Attributes:
        mark: of the connections that its policy, as it is now, let through. A new policy gets a
            new one, so that what the old one let through is looked at again, or cut.
        learned: when each address of a name stops being allowed, by (set, address).
    """

    number: int
    mark: int = 0
    policy: Compiled = field(default_factory=Compiled)
    learned: dict[tuple[int, Address], float] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """The number of its device."""
        return DEVICE_INDEX_BASE + self.number

    @property
    def device(self) -> str:
        """The name of its device."""
        return f"{DEVICE_PREFIX}{self.number}"

    def remember(self, found: Iterable[tuple[int, Address, float]], now: float) -> bool:
        """Note addresses of names, each as (set, address, seconds); false when there are too many.

        Those whose time is over make room.
        """
        fresh = {(group, address): now + seconds for group, address, seconds in found}
        if len(self.learned) + len(fresh) > _LEARNED_MOST:
            self.learned = {key: until for key, until in self.learned.items() if until > now}
        if len(self.learned) + len(fresh) > _LEARNED_MOST:
            return False
        self.learned |= fresh
        return True


class Rules:
    """The requests about one node's table. Each method returns what one transaction does."""

    def __init__(
        self, plan: AddressPlan, denied: Iterable[Network] = (), connections_max: int = 1024
    ) -> None:
        self._plan = plan
        self._connections_max = connections_max
        self.table = nft.Table("dsec")
        self.never: tuple[Network, ...] = (*NEVER, plan.ipv4, plan.ipv6, *denied)

    def is_never(self, address: Address) -> bool:
        """Return whether no sandbox ever reaches an address, but for the node's own."""
        return any(
            address.version == network.version and address in network for network in self.never
        )

    # --- The table ----------------------------------------------------------------------------

    def base(self, node_addresses: Iterable[Address]) -> list[Message]:
        """Make the table: without sandboxes, nothing passes."""
        table = self.table
        requests = [
            table.add(),
            table.set("out", 4, nft.SET_MAP),
            table.set("in", 4, nft.SET_MAP),
            table.set("local", 4, nft.SET_MAP),
            table.base_chain(
                "source", "filter", nft.HOOK_PREROUTING, nft.PRIORITY_RAW, drops=False
            ),
            table.base_chain(
                "forward", "filter", nft.HOOK_FORWARD, nft.PRIORITY_FILTER, drops=True
            ),
            table.base_chain("input", "filter", nft.HOOK_INPUT, nft.PRIORITY_FILTER, drops=True),
            table.base_chain(
                "leave", "nat", nft.HOOK_POSTROUTING, nft.PRIORITY_SOURCE_NAT, drops=False
            ),
        ]
        for version in (4, 6):
            size = _BYTES_OF[version]
            requests += [
                table.set(f"own{version}", 4 + size),
                table.set(f"node{version}", size),
                table.set(f"never{version}", size, nft.SET_INTERVAL),
                table.elements(f"never{version}", *self._never_elements(version)),
            ]
        from_sandbox = nft.meta(nft.META_IIFNAME) + nft.compare(DEVICE_PREFIX.encode())
        from_elsewhere = nft.meta(nft.META_IIFNAME) + nft.compare(
            DEVICE_PREFIX.encode(), nft.NOT_EQUAL
        )
        for version, family in _FAMILY_OF.items():
            own = nft.device_and_source(version) + nft.lookup(f"own{version}")
            requests.append(
                table.rule("source", from_sandbox, nft.of_family(family), own, nft.ACCEPT)
            )
        requests += [
            table.rule("source", from_sandbox, nft.DROP),
            table.rule("forward", nft.meta(nft.META_IIF), nft.lookup_verdict("out")),
            table.rule("forward", nft.meta(nft.META_OIF), nft.lookup_verdict("in")),
            table.rule("input", nft.meta(nft.META_IIF), nft.lookup_verdict("local")),
            # Answers to what the node itself asks for sandboxes, from anywhere but a sandbox.
            table.rule("input", from_elsewhere, nft.in_state("established"), nft.ACCEPT),
            table.rule(
                "leave",
                nft.meta(nft.META_OIFNAME),
                nft.compare(nft.interface_name(UPLINK_NAME)),
                nft.MASQUERADE,
            ),
        ]
        return requests + self.node_addresses(node_addresses)

    def _never_elements(self, version: int) -> list[bytes]:
        ranges: list[list[int]] = []
        for network in sorted(
            (network for network in self.never if network.version == version),
            key=lambda network: int(network.network_address),
        ):
            first, last = int(network.network_address), int(network.broadcast_address)
            if ranges and first <= ranges[-1][1] + 1:
                ranges[-1][1] = max(ranges[-1][1], last)
            else:
                ranges.append([first, last])
        return [
            element
            for first, last in ranges
            for element in nft.interval(first, last, _BYTES_OF[version])
        ]

    def node_addresses(self, addresses: Iterable[Address]) -> list[Message]:
        """Have exactly these be the addresses of the node itself."""
        now = list(addresses)
        requests = []
        for version in (4, 6):
            elements = [nft.element(one.packed) for one in now if one.version == version]
            requests.append(self.table.flush_set(f"node{version}"))
            if elements:
                requests.append(self.table.elements(f"node{version}", *elements))
        return requests

    # --- One sandbox --------------------------------------------------------------------------

    def attach(self, port: Port) -> list[Message]:
        """Let a sandbox's device in, under its policy."""
        table, number = self.table, port.number
        key = nft.device_key(port.index)
        own = [key + address.packed for address in self._plan.addresses(number)]
        return [
            table.counter(f"r{number}"),
            *(table.chain(f"{kind}{number}") for kind in "roin"),
            *self._refusal(number),
            *self._policy_rules(port),
            table.elements("own4", nft.element(own[0])),
            table.elements("own6", nft.element(own[1])),
            table.elements("out", nft.element_goto(key, f"o{number}")),
            table.elements("in", nft.element_goto(key, f"i{number}")),
            table.elements("local", nft.element_goto(key, f"n{number}")),
        ]

    def detach(self, port: Port) -> list[Message]:
        """Undo :meth:`attach`."""
        table, number = self.table, port.number
        key = nft.device_key(port.index)
        own = [key + address.packed for address in self._plan.addresses(number)]
        return [
            table.delete_elements("own4", nft.element(own[0])),
            table.delete_elements("own6", nft.element(own[1])),
            *(table.delete_elements(name, nft.element(key)) for name in ("out", "in", "local")),
            *(table.flush_chain(f"{kind}{number}") for kind in "oinr"),
            *(table.delete_chain(f"{kind}{number}") for kind in "oinr"),
            *self._delete_host_sets(port),
            table.delete_counter(f"r{number}"),
        ]

    def change(self, before: Port, after: Port) -> list[Message]:
        """Put a sandbox under another policy, in one step."""
        table, number = self.table, before.number
        return [
            *(table.flush_chain(f"{kind}{number}") for kind in "oin"),
            *self._delete_host_sets(before),
            *self._policy_rules(after),
        ]

    def learn(self, port: Port, found: Iterable[tuple[int, Address, float]]) -> list[Message]:
        """Allow addresses of names, each as (set, address, seconds)."""
        return [
            self.table.elements(
                _host_set(port, group, address.version), nft.element(address.packed, seconds)
            )
            for group, address, seconds in found
        ]

    def counter(self, port: Port) -> str:
        """Return the name of the counter of what was refused."""
        return f"r{port.number}"

    def _refusal(self, number: int) -> list[Message]:
        chain = f"r{number}"
        table = self.table
        return [
            table.rule(chain, nft.count_as(chain)),
            table.rule(chain, nft.at_most(1, 8), nft.log_to(LOG_GROUP, _LOG_BYTES)),
            table.rule(chain, nft.of_protocol(_NUMBERS["tcp"]), nft.RESET),
            table.rule(chain, nft.PROHIBITED),
        ]

    def _policy_rules(self, port: Port) -> list[Message]:
        table, number, policy = self.table, port.number, port.policy
        out, into, local = f"o{number}", f"i{number}", f"n{number}"
        refuse = nft.goto(f"r{number}")
        if policy.mode is NetworkMode.NONE:
            return [table.rule(out, refuse), table.rule(local, refuse)]
        accept = nft.mark(port.mark) + nft.ACCEPT
        established = nft.marked(port.mark) + nft.in_state("established", "related") + nft.ACCEPT
        requests = [
            table.rule(
                out,
                nft.of_family(family),
                nft.destination(version),
                nft.lookup(f"{name}{version}"),
                refuse,
            )
            for version, family in _FAMILY_OF.items()
            for name in ("never", "node")
        ]
        requests.append(table.rule(out, established))
        requests += self._matches(out, policy.deny, refuse)
        requests += self._connection_limits(port, refuse)
        if policy.mode is NetworkMode.OPEN:
            requests.append(table.rule(out, accept))
        requests += self._matches(out, policy.allow, accept)
        requests += self._host_rules(port, accept)
        requests.append(table.rule(out, refuse))
        requests.append(table.rule(into, established))
        requests += self._resolver_rules(local, refuse)
        return requests

    def _connection_limits(self, port: Port, refuse: bytes) -> list[Message]:
        """Refuse new connections beyond what one sandbox may have of a table that all share."""
        most = self._connections_max
        begins = nft.in_state("new")
        # One that is let through is marked: what follows of it is no further connection.
        fresh = begins + nft.not_marked(port.mark)
        return [
            self.table.rule(port_chain(port), begins, nft.connections_over(most), refuse),
            self.table.rule(
                port_chain(port), fresh, nft.more_than(connections_per_s(most), most), refuse
            ),
        ]

    def _resolver_rules(self, chain: str, refuse: bytes) -> list[Message]:
        requests = []
        ports = nft.destination_ports(_DNS, _DNS)
        for address in self._plan.resolver:
            to_resolver = (
                nft.of_family(_FAMILY_OF[address.version])
                + nft.destination(address.version)
                + nft.compare(address.packed)
            )
            for protocol in ("udp", "tcp"):
                requests.append(  # noqa: PERF401  a rule each, and readable
                    self.table.rule(
                        chain,
                        to_resolver,
                        nft.of_protocol(_NUMBERS[protocol]),
                        ports,
                        nft.at_most(_QUERIES_PER_S, _QUERIES_PER_S),
                        nft.ACCEPT,
                    )
                )
        return [*requests, self.table.rule(chain, refuse)]

    def _matches(
        self, chain: str, destinations: Iterable[Destination], verdict: bytes
    ) -> list[Message]:
        return [
            self.table.rule(chain, address, ports, verdict)
            for destination in destinations
            for ports in _ports_matches(destination.ports, destination.network)
            for address in [_network_match(destination.network)]
        ]

    def _host_rules(self, port: Port, accept: bytes) -> list[Message]:
        requests: list[Message] = []
        for group, ports in enumerate(port.policy.ports_of_hosts):
            for version, family in _FAMILY_OF.items():
                name = _host_set(port, group, version)
                requests.append(self.table.set(name, _BYTES_OF[version], nft.SET_TIMEOUT))
                address = nft.of_family(family) + nft.destination(version) + nft.lookup(name)
                requests += [
                    self.table.rule(port_chain(port), address, match, accept)
                    for match in _ports_matches(ports, None, version)
                ]
        return requests

    def _delete_host_sets(self, port: Port) -> list[Message]:
        if port.policy.mode is not NetworkMode.ALLOW:
            return []
        return [
            self.table.delete_set(_host_set(port, group, version))
            for group in range(len(port.policy.ports_of_hosts))
            for version in (4, 6)
        ]


def connections_per_s(connections_max: int) -> int:
    """Return how many connections one sandbox may begin each second, in the long run.

    Closed ones count in no limit of those that live, and are remembered for a while, by the host
    too: 120 s, in which one sandbox's are an eighth of a table of usual size.
    """
    return max(connections_max // 4, 1)


def port_chain(port: Port) -> str:
    """Return the chain of what a sandbox sends."""
    return f"o{port.number}"


def _host_set(port: Port, group: int, version: int) -> str:
    return f"h{port.number}_{port.mark:x}_{group}_{version}"


def _network_match(network: Network | None) -> bytes:
    if network is None:
        return b""
    match = nft.of_family(_FAMILY_OF[network.version]) + nft.destination(network.version)
    if network.prefixlen == 0:
        return nft.of_family(_FAMILY_OF[network.version])
    if network.prefixlen < network.max_prefixlen:
        match += nft.masked(network.netmask.packed)
    return match + nft.compare(network.network_address.packed)


def _ports_matches(ports: Ports, network: Network | None, version: int = 0) -> list[bytes]:
    """Return the alternatives of which one must match."""
    version = network.version if network is not None else version
    if not ports.protocol:
        return [b""]
    if ports.protocol == "icmp":
        return [
            nft.of_family(family) + nft.of_protocol(number)
            for family, number in _ICMP
            if not version or _FAMILY_OF[version] == family
        ]
    match = nft.of_protocol(_NUMBERS[ports.protocol])
    if not ports.all_ports:
        match += nft.destination_ports(ports.first, ports.last)
    return [match]
