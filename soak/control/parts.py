"""Who kills brokers and schedulers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final

from soak.chaos_run import Part

#: How often all of one kind die at the same moment, and how often two of any kind do.
_ALL_OF_A_KIND: Final = 0.1
_TWO: Final = 0.3


class Chaos:
    """Kills parts until it is cancelled."""

    def __init__(self, parts: Sequence[Part], *, seed: int, every_s: float) -> None:
        self._parts = parts
        self._every_s = every_s
        self._random = random.Random(f"{seed} chaos")  # noqa: S311  to be repeated

    async def run(self) -> None:
        """Kill until cancelled."""
        while True:
            await asyncio.sleep(self._every_s * self._random.uniform(0.4, 1.6))
            for part in self._victims():
                part.kill()

    def _victims(self) -> Sequence[Part]:
        pick = self._random.random()
        if pick < _ALL_OF_A_KIND:
            kind = self._random.choice(self._parts).kind
            return [part for part in self._parts if part.kind == kind]
        return self._random.sample(self._parts, 2 if pick < _TWO else 1)
