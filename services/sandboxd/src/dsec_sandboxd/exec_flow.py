"""How much output one daemon moves in a moment, however much its sandboxes print."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_WINDOW_S: Final = 0.01
_WINDOW_BYTES: Final = 2 << 20


class Flow:
    """Lets so many bytes pass in each hundredth of a second; whoever comes later waits its turn.

    A command that prints faster is slowed by its full pipe, and requests are answered meanwhile.
    """

    def __init__(self, window_bytes: int = _WINDOW_BYTES, window_s: float = _WINDOW_S) -> None:
        self._window_bytes = window_bytes
        self._window_s = window_s
        self._left = window_bytes
        self._ends_at = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def spend(self, size: int) -> bool:
        """Count bytes that were moved; return whether more may be, before one's next turn."""
        now = asyncio.get_running_loop().time()
        if now >= self._ends_at and self._timer is None:
            self._ends_at = now + self._window_s
            self._left = self._window_bytes
        self._left -= size
        return self._left > 0

    def later(self, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` when there is room again."""
        self._waiting.append(go_on)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(self._ends_at - loop.time(), 0.0), self._next_window)

    def _next_window(self) -> None:
        self._timer = None
        self._ends_at = 0.0
        waiting, self._waiting = self._waiting, deque()
        for go_on in waiting:
            go_on()

    def close(self) -> None:
        """Forget who waits. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting.clear()
