"""What the kernel tells of packets it refused: which sandbox wanted to reach what."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dsec_sandboxd.network.netlink import attributes, messages
from dsec_sandboxd.network.plan import DEVICE_INDEX_BASE, SANDBOXES_MAX

SAMPLES_AT_ONCE: Final = 8
_PACKET: Final = 4 << 8
_INCOMING_DEVICE: Final = 4
_PAYLOAD: Final = 9
_PROTOCOLS: Final = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp", 132: "sctp"}
_WITH_PORTS: Final = frozenset({6, 17, 132})
_IPV4_BYTES: Final = 20
_IPV6_BYTES: Final = 40


@dataclass(frozen=True, slots=True)
class Refusal:
    """A packet that did not leave its sandbox."""

    number: int
    address: str
    protocol: str
    port: int


@dataclass(slots=True)
class Samples:
    """Counts all, and lets through a few at once and one a second after that."""

    seen: int = 0
    _left: float = SAMPLES_AT_ONCE
    _at: float = 0.0

    def take(self, now: float) -> bool:
        """Count one; return whether to tell of it."""
        self.seen += 1
        self._left = min(SAMPLES_AT_ONCE, self._left + now - self._at)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def refusals(data: bytes) -> Iterator[Refusal]:
    """Yield what a datagram of the kernel's log tells; the packets in it are a sandbox's own."""
    for kind, _, body in messages(data):
        if kind != _PACKET:
            continue
        number, packet = -1, b""
        for key, value in attributes(body[4:]):
            if key == _INCOMING_DEVICE and len(value) == 4:  # noqa: PLR2004  a number of 32 bits
                number = struct.unpack(">I", value)[0] - DEVICE_INDEX_BASE
            elif key == _PAYLOAD:
                packet = value
        refusal = _read(number, packet)
        if refusal is not None and 0 <= number < SANDBOXES_MAX:
            yield refusal


def _read(number: int, packet: bytes) -> Refusal | None:
    if len(packet) < _IPV4_BYTES:
        return None
    if packet[0] >> 4 == 4:  # noqa: PLR2004  IP version 4
        protocol, header = packet[9], (packet[0] & 15) * 4
        address = ipaddress.ip_address(packet[16:20])
    elif packet[0] >> 4 == 6 and len(packet) >= _IPV6_BYTES:  # noqa: PLR2004  IP version 6
        protocol, header = packet[6], _IPV6_BYTES
        address = ipaddress.ip_address(packet[24:40])
    else:
        return None
    port = 0
    if protocol in _WITH_PORTS and len(packet) >= header + 4:
        port = int.from_bytes(packet[header + 2 : header + 4], "big")
    return Refusal(number, str(address), _PROTOCOLS.get(protocol, str(protocol)), port)
