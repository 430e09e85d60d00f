"""Network policies, checked whole and made ready for the kernel and the resolver. No I/O.

A node enforces them; whoever keeps one for many sandboxes refuses it first if it makes no sense.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.wire.network import (
    NETWORK_RULES_MAX,
    NetworkMode,
    NetworkPolicy,
    NetworkRule,
)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_PORT_MAX: Final = 65_535
_PORT_RANGES_MAX: Final = 16
_NAME_MAX: Final = 253
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_PROTOCOLS: Final = frozenset({"tcp", "udp", "icmp"})
_MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")

#: What no policy makes reachable: the node and its like, metadata services, and ways around them.
NEVER: Final[tuple[Network, ...]] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, and most clouds' metadata
        "100.100.100.200/32",  # metadata: Alibaba
        "168.63.129.16/32",  # metadata: Azure's wire server
        "192.0.0.192/32",  # metadata: Oracle
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/96",  # unspecified, loopback, and IPv4 written within IPv6
        "::ffff:0:0/96",
        "64:ff9b::/96",  # translated to IPv4 by some networks
        "64:ff9b:1::/48",
        "2001::/32",  # Teredo and 6to4 carry IPv4, too
        "2002::/16",
        "fd00:ec2::/32",  # metadata: Amazon
        "fd20:ce::254/128",  # metadata: Google
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
)

_WEB: Final = "80,443"

#: Sets that every node knows; its configuration adds to them, or replaces one by its name.
RULE_SETS: Final[Mapping[str, tuple[NetworkRule, ...]]] = {
    name: tuple(NetworkRule(host=host, ports=_WEB, protocol="tcp") for host in hosts)
    for name, hosts in {
        "pypi": ("pypi.org", "files.pythonhosted.org"),
        "npm": ("registry.npmjs.org", "registry.yarnpkg.com"),
        "github": (
            "github.com",
            "api.github.com",
            "codeload.github.com",
            "ghcr.io",
            "*.githubusercontent.com",
            "*.github.com",
        ),
        "debian": ("deb.debian.org", "security.debian.org", "*.debian.org"),
        "ubuntu": ("archive.ubuntu.com", "security.ubuntu.com", "*.archive.ubuntu.com"),
        "crates": ("crates.io", "index.crates.io", "static.crates.io"),
        "golang": ("proxy.golang.org", "sum.golang.org"),
        "rubygems": ("rubygems.org", "index.rubygems.org"),
        "maven": ("repo1.maven.org", "repo.maven.apache.org"),
        "conda": ("conda.anaconda.org", "repo.anaconda.com"),
        "huggingface": ("huggingface.co", "*.huggingface.co", "*.hf.co"),
    }.items()
}


@dataclass(frozen=True, slots=True)
class Ports:
    """One protocol (0 is any) and a range of its ports (0 to 65535 when they do not matter)."""

    protocol: str = ""
    first: int = 0
    last: int = _PORT_MAX

    @property
    def all_ports(self) -> bool:
        """Whether every port is meant."""
        return self.first == 0 and self.last == _PORT_MAX


@dataclass(frozen=True, slots=True)
class Destination:
    """Addresses (all when None) with protocol and ports."""

    network: Network | None
    ports: Ports


@dataclass(frozen=True, slots=True)
class HostPattern:
    """A name, or all names below one."""

    name: str
    below: bool

    def matches(self, name: str) -> bool:
        """Return whether ``name``, in lower case and without a last dot, is meant."""
        if self.below:
            return name.endswith("." + self.name)
        return name == self.name


@dataclass(frozen=True, slots=True)
class Compiled:
    """A policy as it is enforced.

    Attributes:
        hosts: allowed names with what is reachable at their addresses.
        denied_hosts: names that the resolver refuses, where only names lead to addresses.
    """

    mode: NetworkMode = NetworkMode.NONE
    allow: tuple[Destination, ...] = ()
    deny: tuple[Destination, ...] = ()
    hosts: tuple[tuple[HostPattern, Ports], ...] = ()
    denied_hosts: tuple[HostPattern, ...] = ()
    ports_of_hosts: tuple[Ports, ...] = field(default=())
    """The distinct ones of ``hosts``, in their order."""

    def may_ask(self, name: str) -> bool:
        """Return whether the resolver may look ``name`` up for a sandbox under this policy."""
        if any(pattern.matches(name) for pattern in self.denied_hosts):
            return False
        if self.mode is NetworkMode.OPEN:
            return True
        return self.mode is NetworkMode.ALLOW and any(
            pattern.matches(name) for pattern, _ in self.hosts
        )

    def ports_at(self, name: str) -> tuple[int, ...]:
        """Return which of ``ports_of_hosts``, by number, are reachable at ``name``'s addresses."""
        wanted = {ports for pattern, ports in self.hosts if pattern.matches(name)}
        return tuple(number for number, ports in enumerate(self.ports_of_hosts) if ports in wanted)

    def denies(self, address: Address) -> bool:
        """Return whether no port of an address is reachable, whatever its name."""
        return any(
            destination.network is not None
            and not destination.ports.protocol
            and destination.ports.all_ports
            and address.version == destination.network.version
            and address in destination.network
            for destination in self.deny
        )


def compile_policy(
    policy: NetworkPolicy,
    rule_sets: Mapping[str, Sequence[NetworkRule]] = RULE_SETS,
) -> Compiled:
    """Return a policy ready to be enforced.

    Raises:
        DsecError: ``invalid``, naming the field, the rule and what is possible; ``unsupported``
            for a denied name that would not keep its addresses out of reach.
    """
    mode = policy.mode
    if mode is not NetworkMode.ALLOW and (policy.allow or any(policy.rule_sets.values())):
        raise _invalid("allow", f"mode {mode.value!r} takes no allowed rules; use mode 'allow'")
    allowed = list(policy.allow)
    for name, wanted in policy.rule_sets.items():
        if name not in rule_sets:
            raise invalid(
                f"there is no set of network rules {name[:40]!r} on this node; it knows "
                f"{', '.join(sorted(rule_sets))}",
                field="network.rule_sets",
                reason="unknown_rule_set",
            )
        if wanted:
            allowed += rule_sets[name]
    if len(allowed) + len(policy.deny) > NETWORK_RULES_MAX:
        raise _invalid("allow", f"a policy has at most {NETWORK_RULES_MAX} rules")
    allow, hosts = _sorted_rules(allowed, "allow")
    deny, denied_hosts = _sorted_rules(policy.deny, "deny")
    for pattern, ports in denied_hosts:
        if ports.protocol or not ports.all_ports:
            raise _invalid("deny", f"host {pattern.name!r} is denied whole: leave out its ports")
    if denied_hosts and (allow or mode is NetworkMode.OPEN):
        raise _unenforceable_denial(denied_hosts[0][0])
    expanded = len(allow) + len(deny)
    if expanded > 2 * NETWORK_RULES_MAX:
        raise _invalid("allow", "all its port ranges together are too many")
    return Compiled(
        mode=mode,
        allow=tuple(allow),
        deny=tuple(deny),
        hosts=tuple(hosts),
        denied_hosts=tuple(pattern for pattern, _ in denied_hosts),
        ports_of_hosts=tuple(dict.fromkeys(ports for _, ports in hosts)),
    )


def _unenforceable_denial(pattern: HostPattern) -> DsecError:
    """Return the refusal of a denied name whose addresses the rest of the policy leaves open."""
    name = f"*.{pattern.name}" if pattern.below else pattern.name
    return DsecError(
        ErrorCode.UNSUPPORTED,
        f"network.deny: {name[:80]!r} would stay reachable by its address, which mode 'open' or an "
        "allowed address leaves open: deny its addresses by cidr, or allow nothing but names",
        details={"reason": "network", "field": "network.deny"},
    )


def _invalid(name: str, message: str) -> DsecError:
    return invalid(f"network.{name}: {message}", field=f"network.{name}")


def _sorted_rules(
    rules: Iterable[NetworkRule], name: str
) -> tuple[list[Destination], list[tuple[HostPattern, Ports]]]:
    destinations: list[Destination] = []
    hosts: list[tuple[HostPattern, Ports]] = []
    for rule in rules:
        ports = _ports(rule, name)
        if rule.cidr and rule.host:
            raise _invalid(name, "a rule has a cidr or a host, not both")
        if rule.host:
            pattern = _pattern(rule.host, name)
            hosts += [(pattern, one) for one in ports]
        else:
            network = _network(rule.cidr, name) if rule.cidr else None
            destinations += [Destination(network, one) for one in ports]
    return destinations, hosts


def _network(text: str, name: str) -> Network:
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise _invalid(
            name, f"{text[:50]!r} is not an address or a range such as 10.1.0.0/16"
        ) from None
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        # Written within IPv6, it is that IPv4 network that packets go to.
        low = int(network.network_address) & 0xFFFF_FFFF
        return ipaddress.IPv4Network((low, network.prefixlen - 96))
    return network


def _pattern(text: str, name: str) -> HostPattern:
    below = text.startswith("*.")
    host = (text[2:] if below else text).lower().rstrip(".")
    try:
        host = host.encode("idna").decode() if not host.isascii() else host
    except UnicodeError:
        host = ""
    labels = host.split(".")
    if len(host) > _NAME_MAX or not all(map(_LABEL.fullmatch, labels)):
        raise _invalid(name, f"{text[:80]!r} is not a host name such as example.org, or *.it")
    if not below and labels[-1].isdigit():
        raise _invalid(name, f"{text[:80]!r} is an address: give it as cidr")
    return HostPattern(host, below)


def _ports(rule: NetworkRule, name: str) -> list[Ports]:
    if rule.protocol and rule.protocol not in _PROTOCOLS:
        raise _invalid(name, f"protocol {rule.protocol[:20]!r} is none of icmp, tcp, udp")
    if not rule.ports:
        return [Ports(rule.protocol)]
    if rule.protocol == "icmp":
        raise _invalid(name, "icmp has no ports")
    ranges = [_port_range(text.strip(), name) for text in rule.ports.split(",")]
    if len(ranges) > _PORT_RANGES_MAX:
        raise _invalid(name, f"a rule has at most {_PORT_RANGES_MAX} port ranges")
    protocols = [rule.protocol] if rule.protocol else ["tcp", "udp"]
    return [Ports(protocol, *one) for protocol in protocols for one in ranges]


def _port_range(text: str, name: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isascii() and last.isascii() and first.isdigit() and last.isdigit()):
        raise _invalid(name, f"ports {text[:20]!r} is not a number or a range such as 8000-8100")
    if len(first) > 5 or len(last) > 5 or not 0 < int(first) <= int(last) <= _PORT_MAX:  # noqa: PLR2004  digits of 65535
        raise _invalid(name, f"ports {text[:20]!r} must be from 1 to {_PORT_MAX}, lowest first")
    return int(first), int(last)
