"""A clock that a test turns by hand."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class FakeClock:
    """Time that stands still until :meth:`advance`; a ``Clock`` for services under test.

    Args:
        now: Unix time in seconds at the start.
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._elapsed_s = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return the Unix time that the test has set."""
        return self._now

    def monotonic(self) -> float:
        """Return the seconds by which the clock was advanced; a jump does not count."""
        return self._elapsed_s

    async def sleep(self, delay_s: float) -> None:
        """Return when the clock has been advanced by ``delay_s``."""
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed_s + delay_s, next(self._order), woken))
        await woken

    @property
    def sleeping(self) -> int:
        """How many are waiting in :meth:`sleep`."""
        return sum(not woken.done() for _, _, woken in self._sleepers)

    async def advance(self, seconds: float) -> None:
        """Let time pass, waking each sleeper at its own moment and letting it run."""
        end_s = self._elapsed_s + seconds
        while self._sleepers and self._sleepers[0][0] <= end_s:
            due_s, _, woken = heapq.heappop(self._sleepers)
            self._pass(due_s - self._elapsed_s)
            if not woken.done():
                woken.set_result(None)
                # Once for the sleeper to go on, once for whom it wakes.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        self._pass(end_s - self._elapsed_s)

    def jump(self, seconds: float) -> None:
        """Move the wall clock alone, as an administrator or NTP does."""
        self._now += seconds

    def _pass(self, seconds: float) -> None:
        self._now += seconds
        self._elapsed_s += seconds
