"""Whether a tool may reach a host's port, and at which addresses. Names are looked up once."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Final, Protocol

from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable
from dsec_common.network_policy import Address, Compiled, Destination, Ports
from dsec_common.wire.network import NetworkMode, NetworkPolicy

_NAME_MAX: Final = 253
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
#: Of the last label: what libraries take for a number makes the whole an address to them.
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")


class Way(Protocol):
    """The way out, as :class:`dsec_sandboxd.network.outgoing.Outgoing` is one."""

    async def ready_for(self, policy: NetworkPolicy) -> Compiled:
        """Return a policy as it is to be enforced."""
        ...

    def is_never(self, address: Address) -> bool:
        """Return whether no policy makes an address reachable."""
        ...

    async def look_up(self, name: str) -> tuple[Address, ...]:
        """Return the addresses of a name."""
        ...

    def tcp_socket(self, family: socket.AddressFamily) -> socket.socket:
        """Return a socket that connects by this way."""
        ...


async def addresses_of(way: Way, policy: Compiled, host: str, port: int) -> tuple[Address, ...]:
    """Return the addresses at which a policy lets a host's port be reached; there is one at least.

    Whoever connects has to use these and not look the name up again: a name may have another
    address by then.

    Args:
        way: knows names, and what is never reachable.
        policy: compiled.
        host: a name or an address, as an URL has it.
        port: of TCP.

    Raises:
        DsecError: ``denied`` when none may be reached; ``invalid`` for what is no host;
            ``unavailable`` for a name without an address.
    """
    literal = _literal(host)
    if literal is not None:
        if not _may_reach(way, policy, literal, port, by_name=False):
            raise _denied(host, port)
        return (literal,)
    name = _name(host)
    if not policy.may_ask(name):
        raise _denied(host, port)
    by_name = any(_covers(policy.ports_of_hosts[number], port) for number in policy.ports_at(name))
    found = await way.look_up(name)
    if not found:
        raise unavailable(f"{name} has no address")
    reachable = tuple(one for one in found if _may_reach(way, policy, one, port, by_name=by_name))
    if not reachable:
        raise _denied(host, port)
    return reachable


def _may_reach(way: Way, policy: Compiled, address: Address, port: int, *, by_name: bool) -> bool:
    if way.is_never(address) or _among(policy.deny, address, port):
        return False
    if policy.mode is NetworkMode.OPEN:
        return True
    return policy.mode is NetworkMode.ALLOW and (by_name or _among(policy.allow, address, port))


def _among(destinations: Iterable[Destination], address: Address, port: int) -> bool:
    return any(
        _covers(one.ports, port)
        and (
            one.network is None
            or (one.network.version == address.version and address in one.network)
        )
        for one in destinations
    )


def _covers(ports: Ports, port: int) -> bool:
    return ports.protocol in {"", "tcp"} and ports.first <= port <= ports.last


def _literal(host: str) -> Address | None:
    if "%" in host:  # an interface of the node's
        raise invalid(f"{host[:80]!r} is no host")
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _name(host: str) -> str:
    name = host.lower().rstrip(".")
    labels = name.split(".")
    if len(name) > _NAME_MAX or not all(map(_LABEL.fullmatch, labels)):
        raise invalid(f"{host[:80]!r} is no host")
    if _NUMBER.fullmatch(labels[-1]):
        raise invalid(f"{host[:80]!r} is no host: write an address in full, such as 192.0.2.1")
    return name


def _denied(host: str, port: int) -> DsecError:
    return DsecError(
        ErrorCode.DENIED,
        f"tools of this sandbox may not reach port {port} of {host[:253]}: its contract's network "
        "does not lead there, or nothing does",
        details={"host": host[:253], "port": port},
    )
