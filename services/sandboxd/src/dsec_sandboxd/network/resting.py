"""Network namespaces that are over, let go of together.

The kernel holds its one lock on devices for tens of milliseconds when the last user of a connected
namespace goes, however many go at once, and whoever is being connected waits for it. So they go in
batches, a moment after their sandboxes: nothing is in them, and nothing passes their devices.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

RESTING_AT_ONCE: Final = 64
_REST_S: Final = 1.0


class Resting:
    """Descriptors of namespaces, closed by the dozen."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, descriptor: int) -> None:
        """Take a descriptor over."""
        self._descriptors.append(descriptor)
        if len(self._descriptors) >= RESTING_AT_ONCE:
            self.close()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_REST_S, self.close)

    def close(self) -> None:
        """Let go of all. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
