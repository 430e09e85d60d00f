"""What waits at a served subject, and the part of a process that one project may take.

One project's flood must be its own trouble: whoever else asks finds a place, waits behind as many
requests of the flood as of anybody else, and never hears that there is no room.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

from dsec_common.subjects import SYSTEM

T = TypeVar("T")

#: Of places to work in and to wait in, one in so many is for others than the project that has most.
_RESERVE: Final = 8
#: Large requests that one project may have in a process, being worked at or waiting.
PROJECT_BYTES_MAX: Final = 256 << 20
#: Smaller ones are bounded by their number.
_LARGE_BYTES: Final = 16 << 10


def share_of(places: int, project: str) -> int:
    """Return how many of ``places`` one project may have; services among themselves all."""
    return places if project == SYSTEM else places - places // _RESERVE


class Held:
    """The bytes of large requests that a process holds, by project."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def take(self, project: str, size_bytes: int) -> bool:
        """Count a request; false when its project would have more than its part."""
        if size_bytes < _LARGE_BYTES:
            return True
        now = self._bytes.get(project, 0) + size_bytes
        if now > PROJECT_BYTES_MAX and project != SYSTEM:
            return False
        self._bytes[project] = now
        return True

    def give_back(self, project: str, size_bytes: int) -> None:
        """Forget a request that was counted."""
        if size_bytes < _LARGE_BYTES:
            return
        left = self._bytes[project] - size_bytes
        if left:
            self._bytes[project] = left
        else:
            del self._bytes[project]


class Intake(Generic[T]):
    """Places to work in, ``concurrency`` of them, and places to wait in, ``max_pending``.

    Projects take turns in leaving the queue; each keeps its own order.
    """

    def __init__(self, concurrency: int, max_pending: int) -> None:
        self._concurrency = concurrency
        self._max_pending = max_pending
        self._total_working = 0
        self._working: dict[str, int] = {}
        self._waiting: dict[str, deque[T]] = {}
        self.waiting = 0

    def begin(self, project: str) -> bool:
        """Take a place to work in; false when there is none for this project."""
        working = self._working.get(project, 0)
        if self._total_working >= self._concurrency:
            return False
        if working >= share_of(self._concurrency, project):
            return False
        self._working[project] = working + 1
        self._total_working += 1
        return True

    def end(self, project: str) -> None:
        """Give a place to work in back."""
        self._total_working -= 1
        working = self._working[project] - 1
        if working:
            self._working[project] = working
        else:
            del self._working[project]

    def wait(self, project: str, item: T) -> bool:
        """Queue ``item``; false when there is no place to wait in for this project."""
        queue = self._waiting.get(project)
        waiting = len(queue) if queue is not None else 0
        if self.waiting >= self._max_pending or waiting >= share_of(self._max_pending, project):
            return False
        if queue is None:
            queue = self._waiting[project] = deque()
        queue.append(item)
        self.waiting += 1
        return True

    def next(self) -> tuple[str, T] | None:
        """Return what waits longest of the project whose turn it is, with a place to work in."""
        for project, queue in self._waiting.items():
            if self.begin(project):
                item = queue.popleft()
                self.waiting -= 1
                del self._waiting[project]
                if queue:
                    self._waiting[project] = queue  # behind all others
                return project, item
        return None

    def take_all(self) -> list[T]:
        """Empty the queue and return what waited."""
        left = [item for queue in self._waiting.values() for item in queue]
        self._waiting.clear()
        self.waiting = 0
        return left
