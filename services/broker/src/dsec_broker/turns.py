"""Turns at a node's record between brokers, so that none starves.

A broker with a queue for one record would write again the moment its last write took effect.
Another that lost the race has to read first, and would lose each time. Where others write too, a
broker therefore leaves a gap after each of its writes to a record; what comes meanwhile shares the
next.
"""

from __future__ import annotations

import math
from typing import Final

_GAP_S: Final = 0.008
"""Above what a read and a write of another broker take."""
_OTHERS_S: Final = 10.0
"""So long after another's write there are others."""


class Turns:
    """What one broker has written, and whether others write."""

    def __init__(self) -> None:
        self._writing: set[str] = set()
        self._revisions: dict[str, int] = {}
        self._written_at_s: dict[str, float] = {}
        self._others_at_s = -math.inf

    def begin(self, node: str, now_s: float) -> float:
        """Note that a write begins; return how long to wait before it."""
        self._writing.add(node)
        if now_s - self._others_at_s > _OTHERS_S:
            return 0.0
        return max(0.0, self._written_at_s.get(node, -math.inf) + _GAP_S - now_s)

    def won(self, node: str, revision: int, now_s: float) -> None:
        """Note that the write took effect."""
        self._writing.discard(node)
        self._revisions[node] = revision
        self._written_at_s[node] = now_s

    def lost(self, node: str, now_s: float, *, conflict: bool) -> None:
        """Note that it did not; on a conflict another broker was faster."""
        self._writing.discard(node)
        if conflict:
            self._others_at_s = now_s

    def saw(self, node: str, revision: int, now_s: float) -> None:
        """Note a revision that the watch tells: while we write it may be our own."""
        if node not in self._writing and revision > self._revisions.get(node, revision):
            self._others_at_s = now_s
