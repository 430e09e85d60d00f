"""Time limits that are nearly always taken back: one timer of the event loop stands for all.

A timer of the loop costs as much as the rest of a short request. Here setting one is a heap's
insertion, and taking it back a mark.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Final

#: The heap may hold this many entries more than twice the number of living ones before those that
#: were taken back are thrown out.
_STALE_MAX: Final = 256
#: The loop counts whole milliseconds, and may call by half of one too early.
_GRAIN_S: Final = 0.0005


class Timer:
    """One time limit; see :meth:`Timers.call_later`."""

    __slots__ = ("_callback", "_timers", "when")

    def __init__(self, timers: Timers, when: float, callback: Callable[[], object]) -> None:
        self._timers = timers
        self._callback: Callable[[], object] | None = callback
        self.when = when
        """The loop's time at which it is due."""

    @property
    def is_set(self) -> bool:
        """Whether it will still call."""
        return self._callback is not None

    def cancel(self) -> None:
        """Never call. Idempotent."""
        if self._callback is not None:
            self._callback = None
            self._timers.taken_back()

    def fire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call, in a turn of the loop of its own."""
        callback, self._callback = self._callback, None
        if callback is not None:
            loop.call_soon(callback)


class Timers:
    """All time limits of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._stale = 0
        self._handle: asyncio.TimerHandle | None = None

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Call after ``delay_s`` seconds, unless the timer is taken back before."""
        timer = Timer(self, self.loop.time() + delay_s, callback)
        heapq.heappush(self._heap, (timer.when, next(self._order), timer))
        if self._heap[0][2] is timer:
            self._set(timer.when)
        return timer

    def taken_back(self) -> None:
        """Count a timer that is not to call any more."""
        self._stale += 1
        if self._stale > _STALE_MAX + len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].is_set]
            heapq.heapify(self._heap)
            self._stale = 0

    def _set(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self.loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._handle = None
        due = self.loop.time() + _GRAIN_S
        while self._heap and (self._heap[0][0] <= due or not self._heap[0][2].is_set):
            _, _, timer = heapq.heappop(self._heap)
            if timer.is_set:
                timer.fire(self.loop)
            else:
                self._stale -= 1
        if self._heap:
            self._set(self._heap[0][0])


class _Latest(threading.local):
    timers: Timers | None = None


_latest: Final = _Latest()


def timers_of(loop: asyncio.AbstractEventLoop) -> Timers:
    """Return the time limits of a loop, to be called in its thread."""
    timers = _latest.timers
    if timers is None or timers.loop is not loop:
        timers = _latest.timers = Timers(loop)
    return timers
