"""What a node's network has on its host: how it is called, and how to be rid of it.

The node's daemon makes and removes it; whoever cleans up after one that was killed needs no more
than this.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
from typing import Final

#: All nodes' devices on their host begin with it.
DEVICE_PREFIX: Final = "dsec"

_NETLINK_NETFILTER: Final = 12
_REQUEST: Final = 0x1
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NFTABLES: Final = 10
_DELETE_TABLE: Final = _NFTABLES << 8 | 2
_INET: Final = 1
_HEADER: Final = struct.Struct("=IHHII")


def digest_of(node: str) -> str:
    """Return what tells a node's things from those of others, short enough for a device's name."""
    return hashlib.sha256(node.encode()).hexdigest()[:8]


def device_of(node: str) -> str:
    """Return the name of a node's device on its host."""
    return f"{DEVICE_PREFIX}{digest_of(node)}"


def table_of(node: str) -> str:
    """Return the name of a node's nftables table on its host."""
    return f"dsec-{digest_of(node)}"


def remove_table(name: str) -> None:
    """Remove a table of the calling thread's namespace, if it is there and we may."""
    name_part = name.encode() + b"\0"
    attribute = struct.pack("=HH", 4 + len(name_part), 1) + name_part
    body = struct.pack("=BBH", _INET, 0, 0) + attribute.ljust(-(-len(attribute) // 4) * 4, b"\0")
    batch = struct.pack("=BB", 0, 0) + struct.pack(">H", _NFTABLES)
    requests = ((_BATCH_BEGIN, batch), (_DELETE_TABLE, body), (_BATCH_END, batch))
    data = b"".join(
        _HEADER.pack(_HEADER.size + len(content), kind, _REQUEST, number, 0) + content
        for number, (kind, content) in enumerate(requests)
    )
    with (
        contextlib.suppress(OSError),
        socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER
        ) as netlink,
    ):
        netlink.bind((0, 0))
        netlink.send(data)
