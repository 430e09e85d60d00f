"""Devices, addresses and routes: the requests, as netlink has them."""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import Final

from dsec_sandboxd.network.netlink import (
    NETLINK_ROUTE,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Message,
    Netlink,
    attribute,
    attributes,
    nested,
    text,
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: The groups that tell of addresses that come and go, of both families.
ADDRESS_CHANGES: Final = 0x10 | 0x100

_RTM_NEWLINK: Final = 16
_RTM_DELLINK: Final = 17
_RTM_GETLINK: Final = 18
_RTM_NEWADDR: Final = 20
_RTM_GETADDR: Final = 22
_RTM_NEWROUTE: Final = 24
_IFF_UP: Final = 0x1
_IFF_NOARP: Final = 0x80
_IFA_F_NODAD: Final = 0x02
_LINK: Final = struct.Struct("=BBHiII")
_IFADDR: Final = struct.Struct("=BBBBI")
_ROUTE: Final = struct.Struct("=8BI")
_CREATE: Final = NLM_F_CREATE | NLM_F_EXCL
_TABLE_MAIN: Final = 254
_PROTOCOL_STATIC: Final = 4
_SCOPE_LINK: Final = 253
_SCOPE_UNIVERSE: Final = 0
_UNICAST: Final = 1
#: Both ends of a pair have it: a device that does not ask for neighbours sends to its own address.
_HARDWARE_ADDRESS: Final = bytes.fromhex("02d5ec000001")

LOOPBACK_INDEX: Final = 1


def _family(address: Address | Network) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004  IP version 4


def _device(index: int) -> bytes:
    # Not up yet: an end without its peer cannot be.
    return _LINK.pack(0, 0, 0, index, _IFF_NOARP, _IFF_NOARP)


def add_pair(name: str, index: int, peer_name: str, peer_index: int, peer_fd: int) -> Message:
    """Return the request for a pair of devices, both down, the peer in another namespace.

    Neither asks for neighbours: whatever one sends, the other takes.
    """
    peer = nested(
        1,  # VETH_INFO_PEER
        _device(peer_index)
        + text(3, peer_name)
        + attribute(1, _HARDWARE_ADDRESS)
        + attribute(28, struct.pack("=i", peer_fd)),  # IFLA_NET_NS_FD
    )
    body = (
        _device(index)
        + text(3, name)
        + attribute(1, _HARDWARE_ADDRESS)
        + nested(18, text(1, "veth"), nested(2, peer))  # IFLA_LINKINFO: kind, data
    )
    return _RTM_NEWLINK, _CREATE, body


def remove_link(index: int) -> Message:
    """Return the request that removes a device and its peer."""
    return _RTM_DELLINK, 0, _LINK.pack(0, 0, 0, index, 0, 0)


def remove_link_named(name: str) -> Message:
    """Return the request that removes a device, known by its name, and its peer."""
    return _RTM_DELLINK, 0, _LINK.pack(0, 0, 0, 0, 0, 0) + text(3, name)


def bring_up(index: int) -> Message:
    """Return the request that brings a device up."""
    return _RTM_NEWLINK, 0, _LINK.pack(0, 0, 0, index, _IFF_UP, _IFF_UP)


def add_address(index: int, address: Address, prefix: int) -> Message:
    """Return the request that gives a device an address, usable at once."""
    body = _IFADDR.pack(_family(address), prefix, 0, 0, index)
    body += attribute(2, address.packed) + attribute(1, address.packed)
    return _RTM_NEWADDR, _CREATE, body + attribute(8, struct.pack("=I", _IFA_F_NODAD))


def add_route(index: int, to: Network, via: Address | None = None) -> Message:
    """Return the request that routes ``to`` through a device."""
    header = _ROUTE.pack(
        _family(to),
        to.prefixlen,
        0,
        0,
        _TABLE_MAIN,
        _PROTOCOL_STATIC,
        _SCOPE_UNIVERSE if via else _SCOPE_LINK,
        _UNICAST,
        0,
    )
    body = header + attribute(4, struct.pack("=i", index))
    if to.prefixlen:
        body += attribute(1, to.network_address.packed)
    if via is not None:
        body += attribute(5, via.packed)
    return _RTM_NEWROUTE, _CREATE, body


def everything(address: Address) -> Network:
    """Return the range of all addresses of the family of ``address``."""
    return ipaddress.ip_network("0.0.0.0/0" if address.version == 4 else "::/0")  # noqa: PLR2004


def host_addresses(netlink: Netlink) -> set[Address]:
    """Return every address of the namespace's devices."""
    found: set[Address] = set()
    for body in netlink.dump(_RTM_GETADDR, _IFADDR.pack(0, 0, 0, 0, 0)):
        for kind, value in attributes(body[_IFADDR.size :]):
            if kind in {1, 2} and len(value) in {4, 16}:
                found.add(ipaddress.ip_address(value))
    return found


def link_names(netlink: Netlink) -> dict[str, int]:
    """Return the devices of the namespace with their indexes."""
    found: dict[str, int] = {}
    for body in netlink.dump(_RTM_GETLINK, _LINK.pack(0, 0, 0, 0, 0, 0)):
        index = _LINK.unpack_from(body)[3]
        for kind, value in attributes(body[_LINK.size :]):
            if kind == 3:  # noqa: PLR2004  IFLA_IFNAME
                found[value.rstrip(b"\0").decode(errors="replace")] = index
    return found


def route_socket(groups: int = 0) -> Netlink:
    """Return a socket for these requests, in the calling thread's namespace."""
    return Netlink(NETLINK_ROUTE, groups)
