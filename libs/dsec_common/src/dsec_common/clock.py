"""Time as a dependency: services ask a clock, tests and the simulator turn one by hand."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What a service may know about time."""

    def now(self) -> float:
        """Return Unix time in seconds. It may jump; use it for records, not for durations."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go backwards; use it for durations and deadlines."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return after ``delay_s`` seconds of this clock."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Return Unix time in seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Return the kernel's monotonic seconds."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(delay_s)
