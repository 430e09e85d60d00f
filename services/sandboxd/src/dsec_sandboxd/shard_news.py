"""New owners of Chronus's shards: whoever waits for an answer of the last one asks again at once.

An owner that was killed answers nothing, and its silence alone would be noticed only when a long
wait is over. The next one says that it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, unavailable
from dsec_common.subjects import is_to_shard
from dsec_common.wire.rollout_group import ShardTaken


class GivesUp(Protocol):
    """The part of the bus that fails requests."""

    def give_up(self, subject: Callable[[str], bool], error: Callable[[], DsecError]) -> None:
        """Fail the requests to all subjects that match."""
        ...


class ShardNews:
    """What a node hears of shards; one for all that it asks of Chronus."""

    def __init__(self, bus: GivesUp) -> None:
        """Take the bus whose requests are asked again."""
        self._bus = bus
        self._taken: dict[str, asyncio.Event] = {}

    async def taken(self, request: Request[ShardTaken]) -> None:
        """Have all who wait for this shard ask it again."""
        shard = request.message.shard
        event = self._taken.pop(shard, None)
        if event is not None:
            event.set()
        self._bus.give_up(
            lambda subject: is_to_shard(subject, shard),
            lambda: unavailable(
                f"shard {shard} has a new owner; ask again", retry_after_s=0.0, shard=shard
            ),
        )

    async def wait(self, shard: str, seconds: float) -> None:
        """Return after so long, or as soon as the shard has a new owner."""
        event = self._taken.setdefault(shard, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
