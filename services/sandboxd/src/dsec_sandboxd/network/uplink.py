"""Whether a node leads outside, and by which device of its host."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog

from dsec_common.errors import DsecError
from dsec_common.forwarding import forwards

_log: Final = structlog.get_logger(__name__)

AUTO: Final = "auto"
"""By the host's default route, if it has one."""
MANUAL: Final = "manual"
"""By what the operator puts into the router's namespace."""

_DEVICES: Final = Path("/proc/sys/net/ipv4/conf")
_ROUTES: Final = Path("/proc/thread-self/net/route")
_ROUTE_IS_UP: Final = 1


class Uplink:
    """What the configuration wants, and what this host has.

    Args:
        wanted: a device's name, ``auto``, ``manual``, or empty for none.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._failure = ""
        self.leads = wanted == MANUAL
        """Whether what leaves the router gets outside."""

    def device(self) -> str:
        """Return the host's device that leads outside; empty when there is none, or none of it."""
        if self._wanted == MANUAL:
            return ""
        return default_route_device() if self._wanted == AUTO else self._wanted

    def missing(self) -> str:
        """Return why nothing outside can be reached; empty when it can, as far as can be seen."""
        return "" if self.leads else self._failure or self.lacking()

    def lacking(self) -> str:
        """Return why it is not worth an attempt to lead outside; empty when it is."""
        if self.leads:
            return ""
        if not self._wanted:
            return "network_uplink is not set"
        device = self.device()
        if not device:
            return "the host has no default route (IPv4)"
        switch = _DEVICES / device / "forwarding"
        if not switch.exists():
            return f"the host has no device {device!r}"
        if not forwards(device) and not os.access(switch, os.W_OK):
            return "the host does not route and this process may not have it: set net.ipv4.ip_forward=1"  # noqa: E501
        return ""

    async def lead(self, connect: Callable[[str], Awaitable[None]]) -> None:
        """Have the router lead to the device; without one, what needs none works all the same.

        Args:
            connect: the router to a device; to nowhere when it is given an empty name.
        """
        device = "" if self.lacking() else self.device()
        try:
            await connect(device)
        except DsecError as error:
            self._failure = str(error.details.get("what", error.message))
            _log.warning("no_uplink", device=device, error=self._failure)
        else:
            self.leads, self._failure = bool(device), ""

    def closed(self) -> None:
        """Note that there is no router any more; the next one is another attempt."""
        self.leads, self._failure = self._wanted == MANUAL, ""


def default_route_device() -> str:
    """Return the host's device that its IPv4 default route leads through; empty without one."""
    try:
        routes = [line.split() for line in _ROUTES.read_text().splitlines()[1:]]
    except OSError:
        return ""
    found = [
        (int(route[6]), route[0])
        for route in routes
        if route[1] == route[7] == "00000000" and int(route[3], 16) & _ROUTE_IS_UP
    ]
    return min(found)[1] if found else ""
