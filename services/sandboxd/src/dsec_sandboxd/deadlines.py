"""When something is due: the earliest first, changed at little cost. No I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

#: The heap may hold this many entries more than twice the number of names before it is made anew.
_STALE_MAX: Final = 64


class Deadlines:
    """One moment for each name, in seconds of a clock that never goes backwards.

    Asking which are due costs nothing while none is; setting one costs a heap's insertion.
    """

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __contains__(self, name: object) -> bool:
        return name in self._at

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def at(self, name: str) -> float | None:
        """Return when ``name`` is due, or None."""
        return self._at.get(name)

    def set(self, name: str, at_s: float) -> None:
        """Make ``name`` due at a moment, in place of any earlier one."""
        if self._at.get(name) == at_s:
            return
        self._at[name] = at_s
        heapq.heappush(self._heap, (at_s, name))
        if len(self._heap) > 2 * len(self._at) + _STALE_MAX:
            self._heap = [(due_s, each) for each, due_s in self._at.items()]
            heapq.heapify(self._heap)

    def discard(self, name: str) -> None:
        """Make ``name`` never due. Idempotent."""
        self._at.pop(name, None)

    def earliest(self) -> float | None:
        """Return when the next is due, or None when nothing ever is."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_s: float) -> list[str]:
        """Return the names that are due by ``now_s``, the earliest first, and forget them."""
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now_s:
            at_s, name = heapq.heappop(self._heap)
            if self._at.get(name) == at_s:
                del self._at[name]
                due.append(name)
        return due
