"""One after the other, for each sandbox: whoever asked last has the last word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: int = 0


class Turns:
    """Locks by name, which exist for as long as somebody holds or awaits them."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def is_taken(self, name: str) -> bool:
        """Return whether somebody has a turn now, or waits for one."""
        return name in self._turns

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Wait until everybody who asked before is done; those who ask later wait meanwhile."""
        turn = self._turns.setdefault(name, _Turn())
        turn.wanted += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.wanted -= 1
            if not turn.wanted:
                del self._turns[name]
