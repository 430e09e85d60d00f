"""nftables as bytes: tables, chains, sets, elements, rules and the expressions in them.

Numbers are of ``linux/netfilter/nf_tables.h`` and travel in network byte order.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Final

from dsec_sandboxd.network.netlink import (
    NETLINK_NETFILTER,
    NLM_F_APPEND,
    NLM_F_CREATE,
    Message,
    Netlink,
    attribute,
    attributes,
    nested,
    text,
)

_SUBSYSTEM: Final = 10 << 8
_INET: Final = 1
_HEADER: Final = struct.pack("=BBH", _INET, 0, 0)
_BATCH_BODY: Final = struct.pack("=BB", 0, 0) + struct.pack(">H", 10)
_BATCH_BEGIN: Final = (16, 0, _BATCH_BODY)
_BATCH_END: Final = (17, 0, _BATCH_BODY)

_NEW_TABLE, _DELETE_TABLE = 0, 2
_NEW_CHAIN, _DELETE_CHAIN = 3, 5
_NEW_RULE, _DELETE_RULE = 6, 8
_NEW_SET, _DELETE_SET = 9, 11
_NEW_ELEMENT, _DELETE_ELEMENT = 12, 14
_NEW_OBJECT, _GET_OBJECT, _DELETE_OBJECT = 18, 19, 20

_DROP: Final = 0
_ACCEPT: Final = 1
_GOTO: Final = -4

#: Register 1 holds 16 bytes; 12 is its fourth-and-following 4-byte part, for joined keys.
_REGISTER: Final = 1
_SECOND_PART: Final = 9
_VERDICT_DATA: Final = 0xFFFF_FF00
_LIMIT_INVERTED: Final = 1

SET_INTERVAL: Final = 0x4
SET_MAP: Final = 0x8
SET_TIMEOUT: Final = 0x10

HOOK_PREROUTING: Final = 0
HOOK_INPUT: Final = 1
HOOK_FORWARD: Final = 2
HOOK_POSTROUTING: Final = 4

PRIORITY_RAW: Final = -300
PRIORITY_FILTER: Final = 0
PRIORITY_SOURCE_NAT: Final = 100

EQUAL: Final = 0
NOT_EQUAL: Final = 1


def _be32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">I", value & 0xFFFF_FFFF))


def _be64(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">Q", value))


def _value(kind: int, data: bytes) -> bytes:
    return nested(kind, attribute(1, data))


# --- Expressions ----------------------------------------------------------------------------------


@cache
def _expression(name: str, *parts: bytes) -> bytes:
    return nested(1, text(1, name), nested(2, *parts))


@cache
def meta(key: int, register: int = _REGISTER) -> bytes:
    """Load something about the packet."""
    return _expression("meta", _be32(1, register), _be32(2, key))


META_IIF: Final = 4
META_OIF: Final = 5
META_IIFNAME: Final = 6
META_OIFNAME: Final = 7
META_FAMILY: Final = 15
META_PROTOCOL: Final = 16

_NETWORK_HEADER: Final = 1
_TRANSPORT_HEADER: Final = 2
IPV4: Final = 2
IPV6: Final = 10


@cache
def payload(base: int, offset: int, length: int, register: int = _REGISTER) -> bytes:
    """Load bytes of the packet."""
    return _expression(
        "payload",
        _be32(1, register),
        _be32(2, base),
        _be32(3, offset),
        _be32(4, length),
    )


def compare(data: bytes, operation: int = EQUAL) -> bytes:
    """Go on only when the loaded bytes are (not) ``data``."""
    return _expression("cmp", _be32(1, _REGISTER), _be32(2, operation), _value(3, data))


@cache
def masked(mask: bytes) -> bytes:
    """Keep the bits of ``mask`` of what is loaded."""
    return _expression(
        "bitwise",
        _be32(1, _REGISTER),
        _be32(2, _REGISTER),
        _be32(3, len(mask)),
        _value(4, mask),
        _value(5, bytes(len(mask))),
    )


def between(first: bytes, last: bytes) -> bytes:
    """Go on only when what is loaded lies in a range, both ends included."""
    return _expression(
        "range", _be32(1, _REGISTER), _be32(2, EQUAL), _value(3, first), _value(4, last)
    )


def lookup(set_name: str) -> bytes:
    """Go on only when what is loaded is in a set."""
    return nested(1, text(1, "lookup"), nested(2, text(1, set_name), _be32(2, _REGISTER)))


@cache
def lookup_verdict(map_name: str) -> bytes:
    """Do what the map says for what is loaded."""
    return _expression("lookup", text(1, map_name), _be32(2, _REGISTER), _be32(3, 0))


def _verdict_data(kind: int, code: int, chain: str = "") -> bytes:
    parts = _be32(1, code) + (text(2, chain) if chain else b"")
    return nested(kind, nested(2, parts))


def _verdict(code: int, chain: str = "") -> bytes:
    return nested(1, text(1, "immediate"), nested(2, _be32(1, 0), _verdict_data(2, code, chain)))


ACCEPT: Final = _verdict(_ACCEPT)
DROP: Final = _verdict(_DROP)


def goto(chain: str) -> bytes:
    """Go on in another chain, and do not come back."""
    return _verdict(_GOTO, chain)


def connection(key: int) -> bytes:
    """Load something about the packet's connection."""
    return _expression("ct", _be32(1, _REGISTER), _be32(2, key))


CONNECTION_STATE: Final = 0
CONNECTION_STATUS: Final = 2
CONNECTION_MARK: Final = 3
_STATE_NAMES: Final = {"established": 2, "related": 4, "new": 8}


def in_state(*names: str) -> bytes:
    """Go on only when the connection is in one of these states."""
    mask = struct.pack("=I", sum(_STATE_NAMES[name] for name in names))
    return connection(CONNECTION_STATE) + masked(mask) + compare(bytes(4), NOT_EQUAL)


#: Go on only when the connection's destination was translated.
DESTINATION_TRANSLATED: Final = (
    connection(CONNECTION_STATUS) + masked(struct.pack("=I", 1 << 5)) + compare(bytes(4), NOT_EQUAL)
)


def marked(mark: int) -> bytes:
    """Go on only when the connection carries this mark."""
    return connection(CONNECTION_MARK) + compare(struct.pack("=I", mark))


def not_marked(mark: int) -> bytes:
    """Go on only when the connection does not carry this mark."""
    return connection(CONNECTION_MARK) + compare(struct.pack("=I", mark), NOT_EQUAL)


def mark(value: int) -> bytes:
    """Mark the connection."""
    immediate = nested(
        1,
        text(1, "immediate"),
        nested(2, _be32(1, _REGISTER), _value(2, struct.pack("=I", value))),
    )
    return immediate + _expression("ct", _be32(2, CONNECTION_MARK), _be32(4, _REGISTER))


def at_most(per_second: int, burst: int) -> bytes:
    """Go on so often only."""
    return _expression("limit", _be64(1, per_second), _be64(2, 1), _be32(3, burst))


def more_than(per_second: int, burst: int) -> bytes:
    """Go on only when it is so often already."""
    return _expression(
        "limit", _be64(1, per_second), _be64(2, 1), _be32(3, burst), _be32(5, _LIMIT_INVERTED)
    )


def connections_over(count: int) -> bytes:
    """Go on only when more connections than this passed here and live."""
    return _expression("connlimit", _be32(1, count), _be32(2, 1))


def log_to(group: int, bytes_kept: int) -> bytes:
    """Tell the listener of a group of the packet."""
    return _expression(
        "log",
        attribute(1, struct.pack(">H", group)),
        _be32(3, bytes_kept),
        attribute(4, struct.pack(">H", 1)),
    )


#: A connection reset, and "administratively prohibited" of either family.
RESET: Final = _expression("reject", _be32(1, 1), attribute(2, b"\0"))
PROHIBITED: Final = _expression("reject", _be32(1, 2), attribute(2, b"\3"))
MASQUERADE: Final = nested(1, text(1, "masq"), nested(2))


def count_as(counter: str) -> bytes:
    """Count the packet."""
    return nested(1, text(1, "objref"), nested(2, _be32(1, 1), text(2, counter)))


@cache
def of_family(family: int) -> bytes:
    """Go on only with IPv4, or IPv6."""
    return meta(META_FAMILY) + compare(bytes([family]))


@cache
def of_protocol(number: int) -> bytes:
    """Go on only with one protocol above IP."""
    return meta(META_PROTOCOL) + compare(bytes([number]))


def source(version: int, register: int = _REGISTER) -> bytes:
    """Load the source address."""
    return payload(_NETWORK_HEADER, *((12, 4) if version == 4 else (8, 16)), register)  # noqa: PLR2004


def destination(version: int) -> bytes:
    """Load the destination address."""
    return payload(_NETWORK_HEADER, *((16, 4) if version == 4 else (24, 16)))  # noqa: PLR2004


def destination_ports(first: int, last: int) -> bytes:
    """Go on only with a destination port in a range."""
    loaded = payload(_TRANSPORT_HEADER, 2, 2)
    if first == last:
        return loaded + compare(first.to_bytes(2, "big"))
    return loaded + between(first.to_bytes(2, "big"), last.to_bytes(2, "big"))


@cache
def device_and_source(version: int) -> bytes:
    """Load the number of the incoming device and the source address, as one key."""
    return meta(META_IIF) + source(version, _SECOND_PART)


def device_key(index: int) -> bytes:
    """Return a device's number as it is loaded."""
    return struct.pack("=I", index)


def interface_name(name: str) -> bytes:
    """Return a device's name as it is loaded."""
    return name.encode().ljust(16, b"\0")


# --- Things in a table ----------------------------------------------------------------------------


class Table:
    """Requests about one table."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._name = text(1, name)
        self._next_set = 0

    def _request(self, kind: int, flags: int, *parts: bytes) -> Message:
        return _SUBSYSTEM | kind, flags, _HEADER + self._name + b"".join(parts)

    def add(self) -> Message:
        """Make the table, if it is not there."""
        return self._request(_NEW_TABLE, NLM_F_CREATE)

    def delete(self) -> Message:
        """Remove the table and all in it."""
        return self._request(_DELETE_TABLE, 0)

    def base_chain(self, name: str, kind: str, hook: int, priority: int, *, drops: bool) -> Message:
        """Make a chain that packets pass."""
        return self._request(
            _NEW_CHAIN,
            NLM_F_CREATE,
            text(3, name),
            nested(4, _be32(1, hook), _be32(2, priority)),
            _be32(5, _DROP if drops else _ACCEPT),
            text(7, kind),
        )

    def chain(self, name: str) -> Message:
        """Make a chain that others lead to."""
        return self._request(_NEW_CHAIN, NLM_F_CREATE, text(3, name))

    def delete_chain(self, name: str) -> Message:
        """Remove an empty chain that nothing leads to."""
        return self._request(_DELETE_CHAIN, 0, text(3, name))

    def rule(self, chain: str, *expressions: bytes) -> Message:
        """Append a rule."""
        return self._request(
            _NEW_RULE,
            NLM_F_CREATE | NLM_F_APPEND,
            text(2, chain),
            nested(4, *expressions),
        )

    def flush_chain(self, chain: str) -> Message:
        """Remove all rules of a chain."""
        return self._request(_DELETE_RULE, 0, text(2, chain))

    def set(self, name: str, key_bytes: int, flags: int = 0) -> Message:
        """Make a set; with ``SET_MAP`` its values are verdicts."""
        self._next_set = self._next_set % 0xFFFF_FFFF + 1
        parts = [text(2, name), _be32(3, flags), _be32(4, 0), _be32(5, key_bytes)]
        if flags & SET_MAP:
            parts += [_be32(6, _VERDICT_DATA), _be32(7, 0)]
        return self._request(_NEW_SET, NLM_F_CREATE, *parts, _be32(10, self._next_set))

    def delete_set(self, name: str) -> Message:
        """Remove a set that no rule uses."""
        return self._request(_DELETE_SET, 0, text(2, name))

    def elements(self, name: str, *elements: bytes) -> Message:
        """Add elements to a set."""
        return self._request(_NEW_ELEMENT, NLM_F_CREATE, text(2, name), nested(3, *elements))

    def delete_elements(self, name: str, *elements: bytes) -> Message:
        """Remove elements from a set."""
        return self._request(_DELETE_ELEMENT, 0, text(2, name), nested(3, *elements))

    def flush_set(self, name: str) -> Message:
        """Remove all elements of a set."""
        return self._request(_DELETE_ELEMENT, 0, text(2, name))

    def counter(self, name: str) -> Message:
        """Make a named counter."""
        data = nested(4, _be64(1, 0), _be64(2, 0))
        return self._request(_NEW_OBJECT, NLM_F_CREATE, text(2, name), _be32(3, 1), data)

    def delete_counter(self, name: str) -> Message:
        """Remove a named counter that no rule uses."""
        return self._request(_DELETE_OBJECT, 0, text(2, name), _be32(3, 1))

    def read_counter(self, netlink: Netlink, name: str) -> int:
        """Return how many packets a counter has counted."""
        kind, _, body = self._request(_GET_OBJECT, 0, text(2, name), _be32(3, 1))
        for key, value in attributes(netlink.ask(kind, body)[4:]):
            if key == 4:  # noqa: PLR2004  the counter's data
                for inner, number in attributes(value):
                    if inner == 2:  # noqa: PLR2004  packets
                        return int.from_bytes(number, "big")
        return 0


def element(key: bytes, timeout_s: float = 0.0) -> bytes:
    """Return a member of a set, for a while or for good."""
    parts = [_value(1, key)]
    if timeout_s:
        parts.append(_be64(4, max(1, int(timeout_s * 1000))))
    return nested(1, *parts)


def element_goto(key: bytes, chain: str) -> bytes:
    """Return a member of a map: what goes on in ``chain``."""
    return nested(1, _value(1, key), _verdict_data(2, _GOTO, chain))


def interval(first: int, last: int, size: int) -> list[bytes]:
    """Return the members that make a range of a set of ranges, both ends included."""
    members = [nested(1, _value(1, first.to_bytes(size, "big")))]
    if last + 1 < 1 << (8 * size):
        end = (last + 1).to_bytes(size, "big")
        members.append(nested(1, _value(1, end), _be32(3, 1)))
    return members


def commit(netlink: Netlink, requests: list[Message]) -> None:
    """Do all requests or none, in one step that no packet sees half done."""
    if requests:
        netlink.send_batch(_BATCH_BEGIN, requests, _BATCH_END)


def rules_socket() -> Netlink:
    """Return a socket for these requests, in the calling thread's namespace."""
    return Netlink(NETLINK_NETFILTER)
