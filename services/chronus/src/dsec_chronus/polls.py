"""Requests that wait for a stage or for feedback: state, not tasks."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dsec_chronus.events import Waiting
from dsec_chronus.shares import Shares

PER_ROLLOUT_MAX: Final = 64
"""More than this wait on one rollout or group only when most of their callers are gone."""


class Poll(NamedTuple):
    """One request that waits. ``deadline_s`` is monotonic."""

    asked: Waiting
    deadline_s: float


@dataclass(slots=True)
class Polls:
    """All that wait on a shard, by rollout and by deadline."""

    _by_rollout: dict[str, dict[int, Poll]] = field(default_factory=lambda: defaultdict(dict))
    _deadlines: list[tuple[float, int, str]] = field(default_factory=list)
    _shares: Shares = field(default_factory=Shares)

    def __len__(self) -> int:
        return self._shares.total

    def has_room(self, project: str, limit: int) -> bool:
        """Return whether a request of ``project`` may wait when at most ``limit`` may in all."""
        return self._shares.has_room(project, limit)

    def add(self, asked: Waiting, deadline_s: float) -> Poll | None:
        """Let a request wait; return the one that must give way to it, if any."""
        waiting = self._by_rollout[asked.local]
        given_up = None
        if len(waiting) >= PER_ROLLOUT_MAX:
            given_up = waiting.pop(next(iter(waiting)))
            self._shares.add(given_up.asked.project, -1)
        waiting[asked.request_id] = Poll(asked, deadline_s)
        self._shares.add(asked.project, 1)
        heapq.heappush(self._deadlines, (deadline_s, asked.request_id, asked.local))
        return given_up

    def of(self, local: str) -> list[Poll]:
        """Return those that wait on one rollout, the oldest first."""
        return list(self._by_rollout.get(local, {}).values())

    def remove(self, poll: Poll) -> None:
        """Forget one that has been answered."""
        local = poll.asked.local
        waiting = self._by_rollout[local]
        if waiting.pop(poll.asked.request_id, None) is not None:
            self._shares.add(poll.asked.project, -1)
        if not waiting:
            del self._by_rollout[local]

    def expired(self, now_s: float) -> list[Poll]:
        """Remove and return those whose time has come."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id, local = heapq.heappop(self._deadlines)
            poll = self._by_rollout.get(local, {}).get(request_id)
            if poll is not None:
                self.remove(poll)
                found.append(poll)
        return found

    @property
    def next_deadline_s(self) -> float | None:
        """When :meth:`expired` has something to return again, at the earliest."""
        # Entries of answered requests are dropped here, or they would pile up until their time.
        while self._deadlines:
            deadline_s, request_id, local = self._deadlines[0]
            if request_id in self._by_rollout.get(local, {}):
                return deadline_s
            heapq.heappop(self._deadlines)
        return None

    def clear(self) -> Iterator[Poll]:
        """Remove and yield all."""
        waiting, self._by_rollout = self._by_rollout, defaultdict(dict)
        self._deadlines.clear()
        self._shares.clear()
        for polls in waiting.values():
            yield from polls.values()
