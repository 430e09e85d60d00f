"""Which keys are hot: a sample of the operations, counted with bounded memory.

Counting is Misra and Gries' (frequent items): when too many keys are known, all counts are lowered
by their median and those that reach 0 are forgotten. So a key with more than a small part of all
operations is never missed, and no count is too high.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple

KNOWN_KEYS: Final = 2048
WINDOW_S: Final = 60.0
"""How long counts are added to; the report is of this window and the one before it."""

Key = tuple[str, str]


class HotKey(NamedTuple):
    """One key and how much is done with it, estimated from a sample.

    Attributes:
        reads_per_s: over the last one or two minutes, or since the StateDB was opened.
        part: of all operations in that time, 0 to 1.
    """

    namespace: str
    key: str
    reads_per_s: float
    writes_per_s: float
    part: float


class _Window:
    """Counts of one span of time: reads and writes by key."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.counts: dict[Key, list[int]] = {}
        self.total = 0

    def add(self, key: Key, column: int) -> None:
        self.total += 1
        counts = self.counts.get(key)
        if counts is not None:
            counts[column] += 1
            return
        self.counts[key] = [1 - column, column]
        if len(self.counts) > KNOWN_KEYS:
            self._lower()

    def _lower(self) -> None:
        sums = sorted(map(sum, self.counts.values()))
        cut = sums[len(sums) // 2]
        left = {}
        for key, (reads, writes) in self.counts.items():
            whole = reads + writes
            if whole > cut:
                part = (whole - cut) / whole
                left[key] = [round(reads * part), round(writes * part)]
        self.counts = left


class HotKeys:
    """Counts every so many operations.

    Args:
        monotonic: seconds that never go backwards.
        every: one of so many operations is counted, at random.
    """

    def __init__(self, monotonic: Callable[[], float], every: int) -> None:
        self._monotonic = monotonic
        self._every = every
        self._random = random.Random()  # noqa: S311  a sample, not a secret
        self._window = self._last = _Window(monotonic())

    def pause(self) -> int:
        """Return how many operations to let pass before the next that is counted."""
        if self._every == 1:
            return 0
        # What is waited for is memoryless, so that no rhythm of the caller's is in step with it.
        return int(self._random.expovariate(1 / (self._every - 0.5)))

    def note(self, namespace: str, key: str, *, is_write: bool) -> None:
        """Count one operation."""
        now = self._monotonic()
        if now >= self._window.began_s + WINDOW_S:
            self._last, self._window = self._window, _Window(now)
        self._window.add((namespace, key), int(is_write))

    def report(self, limit: int) -> tuple[HotKey, ...]:
        """Return the hottest keys, the hottest first."""
        windows = {self._last, self._window}
        elapsed_s = self._monotonic() - min(window.began_s for window in windows)
        total = sum(window.total for window in windows)
        sums: dict[Key, list[int]] = {}
        for window in windows:
            for key, (reads, writes) in window.counts.items():
                counts = sums.setdefault(key, [0, 0])
                counts[0] += reads
                counts[1] += writes
        hottest = sorted(sums.items(), key=lambda item: (-sum(item[1]), item[0]))[:limit]
        scale = self._every / max(elapsed_s, 1e-9)
        return tuple(
            HotKey(namespace, key, reads * scale, writes * scale, (reads + writes) / total)
            for (namespace, key), (reads, writes) in hottest
        )
