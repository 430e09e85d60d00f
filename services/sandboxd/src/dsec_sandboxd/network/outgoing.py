"""What the node itself asks for sandboxes leaves by their router, and reaches no more than they.

Sockets are made in the router's namespace: what the kernel keeps sandboxes from, such as the host
and its neighbours, it keeps this process from as well when it speaks for one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from pathlib import Path
from typing import Final

import dns.rdataclass
import dns.rdatatype

from dsec_common.errors import unavailable
from dsec_common.network_policy import Address, Compiled, compile_policy
from dsec_common.wire.network import NetworkPolicy
from dsec_sandboxd.network.lookups import look_up
from dsec_sandboxd.network.namespaces import tcp_socket_in
from dsec_sandboxd.network.networks import Networks
from dsec_sandboxd.network.settings import NetworkSettings

_KINDS: Final = (dns.rdatatype.A, dns.rdatatype.AAAA)
_ADDRESSES_MAX: Final = 16


class Outgoing:
    """The way out of the node's own requests.

    Args:
        networks: has the router.
        settings: from the configuration.
        router: where the router's namespace is kept.
    """

    def __init__(self, networks: Networks, settings: NetworkSettings, router: Path) -> None:
        self._networks = networks
        self._settings = settings
        self._router = router

    async def ready_for(self, policy: NetworkPolicy) -> Compiled:
        """Return a policy as it is to be enforced, with the router open.

        Raises:
            DsecError: ``invalid``; ``unsupported`` when this node leads nowhere that it needs.
        """
        await self._networks.check(policy)
        return compile_policy(policy, self._settings.rule_sets)

    def is_never(self, address: Address) -> bool:
        """Return whether no policy makes an address reachable."""
        return self._networks.is_never(address)

    async def look_up(self, name: str) -> tuple[Address, ...]:
        """Return the addresses of a name, by the node's upstream servers and by nothing else."""
        answers = await asyncio.gather(
            *(look_up(self._settings.upstreams, name, kind) for kind in _KINDS)
        )
        found = dict.fromkeys(
            ipaddress.ip_address(record.address)
            for answer in answers
            if answer is not None
            for rrset in answer.answer
            if rrset.rdtype in _KINDS and rrset.rdclass == dns.rdataclass.IN
            for record in rrset
        )
        return tuple(found)[:_ADDRESSES_MAX]

    def tcp_socket(self, family: socket.AddressFamily) -> socket.socket:
        """Return a socket that connects from the router's namespace.

        Raises:
            DsecError: ``unavailable`` when the router has just been closed.
        """
        try:
            router = os.open(self._router, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unavailable("the node's router is being closed") from error
        try:
            return tcp_socket_in(router, family)
        finally:
            os.close(router)
