"""The servers that names are looked up with."""

from __future__ import annotations

import contextlib
import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server that names are looked up with."""

    host: str
    port: int = 53

    @classmethod
    def parse(cls, text: str) -> Upstream:
        """Return the server of ``address``, ``address:port`` or ``[address]:port``.

        Raises:
            ValueError: when it is none of them.
        """
        host, port = text, 53
        if text.startswith("["):
            host, _, rest = text[1:].partition("]")
            port = int(rest.removeprefix(":") or 53)
        elif text.count(":") == 1:
            host, _, rest = text.partition(":")
            port = int(rest)
        if not 0 < port < 1 << 16:
            raise ValueError(f"{text} names no port")
        return cls(str(ipaddress.ip_address(host)), port)


def upstreams_of_host(text: str) -> tuple[Upstream, ...]:
    """Return the servers that a ``resolv.conf`` names."""
    found = []
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "nameserver":
            with contextlib.suppress(ValueError):
                found.append(Upstream.parse(rest.strip().partition("%")[0]))
    return tuple(found[:3])
