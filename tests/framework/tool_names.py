"""Ways out for tools: one that is names alone and goes nowhere, and one to this machine."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field

from dsec_common.network_policy import Address, Compiled, compile_policy
from dsec_common.wire.network import NetworkPolicy
from dsec_sandboxd.network.plan import AddressPlan, Rules

RULES = Rules(AddressPlan(), [ipaddress.ip_network("10.66.0.0/16")])


@dataclass
class Names:
    """Under the rules that every node has, and one of its configuration."""

    names: dict[str, list[str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def ready_for(self, policy: NetworkPolicy) -> Compiled:
        """Return a policy as it is enforced."""
        return compile_policy(policy)

    def is_never(self, address: Address) -> bool:
        """Return whether no policy makes an address reachable."""
        return RULES.is_never(address)

    async def look_up(self, name: str) -> tuple[Address, ...]:
        """Return the addresses of a name, and remember that it was asked for."""
        self.asked.append(name)
        return tuple(map(ipaddress.ip_address, self.names.get(name, [])))

    def tcp_socket(self, family: socket.AddressFamily) -> socket.socket:
        """Lead nowhere."""
        raise OSError("this way leads nowhere")


class Loopback(Names):
    """Leads to servers of the test on this machine, which no real way does."""

    def is_never(self, address: Address) -> bool:
        """Return whether an address is another machine's."""
        return not address.is_loopback

    def tcp_socket(self, family: socket.AddressFamily) -> socket.socket:
        """Return a socket of this machine."""
        return socket.socket(family, socket.SOCK_STREAM)
