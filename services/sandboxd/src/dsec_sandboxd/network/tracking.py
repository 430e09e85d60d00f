"""The kernel's table of connections, of which the router's namespace has one for all sandboxes.

What a sandbox has in it is bounded: by the rules, which count its living connections and how many
begin in a second, by how long the kernel remembers one that is over, and by its own end.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

from dsec_sandboxd.network.netlink import Message, attribute

_DELETE_CONNECTIONS: Final = 1 << 8 | 2
_MARK, _MARK_MASK = 8, 21
#: A mark's upper bits are its sandbox's number, so that one request finds all that are its own.
_SEQUENCE_BITS: Final = 20
_SEQUENCE_MASK: Final = (1 << _SEQUENCE_BITS) - 1

#: Seconds that a TCP connection is remembered that both ends have closed: no rule counts those.
TIME_WAIT_S: Final = 10
_TIME_WAIT: Final = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_time_wait")


class Marks:
    """Marks for connections: one for each policy of a sandbox, none of them twice in a row."""

    def __init__(self) -> None:
        self._sequence = int.from_bytes(os.urandom(4), "big") & _SEQUENCE_MASK

    def fresh(self, number: int) -> int:
        """Return another mark of the sandbox with this number, never 0."""
        self._sequence = self._sequence % _SEQUENCE_MASK + 1
        return number << _SEQUENCE_BITS | self._sequence


def forget_closed_ones_soon() -> None:
    """Bound how long the calling thread's namespace remembers what is over.

    Raises:
        OSError: this host does not track connections, or does not let this process say so.
    """
    _TIME_WAIT.write_text(str(TIME_WAIT_S))


def forgetting(number: int) -> Message:
    """Return the request that removes all connections that a sandbox began.

    The kernel keeps one whose end it has not seen for days, and a sandbox that is killed says
    nothing. They are found by their mark: by an IPv6 address this request finds all the others.
    """
    body = bytes(4)
    for kind, value in ((_MARK, number << _SEQUENCE_BITS), (_MARK_MASK, ~_SEQUENCE_MASK)):
        body += attribute(kind, struct.pack(">I", value & 0xFFFF_FFFF))
    return _DELETE_CONNECTIONS, 0, body
