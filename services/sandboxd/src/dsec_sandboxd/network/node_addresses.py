"""The addresses of the node itself, followed as they change: no sandbox ever reaches one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from dsec_common.network_policy import Address
from dsec_sandboxd.network import links
from dsec_sandboxd.network.netlink import Netlink


class NodeAddresses:
    """Which they are now.

    Args:
        tell: puts them out of reach; awaited before they count as known.
    """

    def __init__(self, tell: Callable[[set[Address]], Awaitable[None]]) -> None:
        self._tell = tell
        self._now: set[Address] = set()
        self._watch: Netlink | None = None
        self._telling = asyncio.Lock()
        self._work: set[asyncio.Task[None]] = set()

    def __contains__(self, address: Address) -> bool:
        return address in self._now

    async def watch(self) -> None:
        """Tell of all that there are, and from now on of each change."""
        self._watch = links.route_socket(links.ADDRESS_CHANGES)
        asyncio.get_running_loop().add_reader(self._watch.fileno(), self._changed)
        await self._note()

    async def close(self) -> None:
        """Watch no longer. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            asyncio.get_running_loop().remove_reader(watch.fileno())
            watch.close()
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._now = set()

    def _changed(self) -> None:
        if self._watch is not None:
            with contextlib.suppress(OSError):  # it fell behind: the addresses are read anew
                self._watch.receive()
        task = asyncio.create_task(self._note(), name="node addresses")
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _note(self) -> None:
        async with self._telling:
            with links.route_socket() as routes:
                now = links.host_addresses(routes)
            if now != self._now:
                await self._tell(now)
                self._now = now
