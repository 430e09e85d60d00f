"""Letting time pass: deadlines when they are due, all else that grows old once a second."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from dsec_common.clock import Clock
from dsec_sandboxd.times import Times

ROUND_S: Final = 1.0
"""Between two looks at what grows old in minutes: uploads, results, connections."""

_BUSY_ROUND_S: Final = 0.25
_SHORTEST_S: Final = 0.05

Chore = Callable[[], Awaitable[None] | None]


class Housekeeping:
    """Sleeps until a sandbox's time is over, or a round is due.

    A time that is set to less than a round from now may be noticed a round late; every other one
    within a twentieth of a second. With 3,200 sandboxes it wakes up once a second as with none.
    """

    def __init__(
        self,
        clock: Clock,
        times: Times,
        end_due: Callable[[], None],
        chores: Sequence[Chore],
        is_busy: Callable[[], bool],
    ) -> None:
        """Take what to do.

        Args:
            clock: measures the pauses.
            times: when sandboxes' times are over.
            end_due: has the core look which are.
            chores: done each round, in order.
            is_busy: whether rounds should come more often now.
        """
        self._clock = clock
        self._times = times
        self._end_due = end_due
        self._chores = chores
        self._is_busy = is_busy

    async def run(self) -> None:
        """Keep house until cancelled."""
        round_at_s = self._clock.monotonic() + self._round_s
        while True:
            await self._clock.sleep(self._pause_s(round_at_s))
            self._end_due()
            if self._clock.monotonic() >= round_at_s:
                for chore in self._chores:
                    done = chore()
                    if done is not None:
                        await done
                round_at_s = self._clock.monotonic() + self._round_s

    @property
    def _round_s(self) -> float:
        return _BUSY_ROUND_S if self._is_busy() else ROUND_S

    def _pause_s(self, round_at_s: float) -> float:
        """Return how long nothing is due; deadlines that lie close together are met together."""
        now_s, due_s = self._clock.monotonic(), self._times.due.earliest()
        until_round_s = max(round_at_s - now_s, 0.0)
        if due_s is None:
            return until_round_s
        return min(max(due_s - now_s, _SHORTEST_S), until_round_s)
