"""Explanations that cost no more than a part of a scheduler's time.

Each takes a look at all that waits. When thousands wait their time is over together, and a project
may ask as often as it likes; meanwhile sandboxes are placed, and nodes heard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dsec_common.clock import Clock
from dsec_common.wire.waiting import WaitingExplained
from dsec_scheduler.asks import Ask

#: So long the reason of one holds for others that ask for the same.
_HOLDS_S: Final = 1.0
#: After each explanation there is none for so many times what it took.
_REST: Final = 4.0
_KEPT_MAX: Final = 1024


class Reasons:
    """Looks for reasons, and remembers them for a moment.

    Args:
        clock: times the looking.
        explain: looks.
    """

    def __init__(self, clock: Clock, explain: Callable[[Ask], WaitingExplained]) -> None:
        self._clock = clock
        self._explain = explain
        self._rests_until = 0.0
        self._said: dict[object, tuple[float, WaitingExplained]] = {}

    async def exactly(self, ask: Ask) -> WaitingExplained:
        """Return why an ask waits, as soon as there is time to look."""
        while (rest_s := self._rests_until - self._clock.monotonic()) > 0:
            await self._clock.sleep(rest_s)
        return self._look(ask)

    def at_once(self, ask: Ask) -> WaitingExplained | None:
        """Return why an ask waits, or why an equal one did a moment ago; None without time."""
        said = self._said.get(_kind(ask))
        now = self._clock.monotonic()
        if said is not None and now - said[0] <= _HOLDS_S:
            return said[1]
        return None if now < self._rests_until else self._look(ask)

    def _look(self, ask: Ask) -> WaitingExplained:
        began = self._clock.monotonic()
        why = self._explain(ask)
        ended = self._clock.monotonic()
        self._rests_until = ended + _REST * (ended - began)
        if len(self._said) >= _KEPT_MAX:
            self._said.clear()
        self._said[_kind(ask)] = (ended, why)
        return why


def _kind(ask: Ask) -> object:
    return ask.project, ask.service_class, ask.priority, ask.demands, ask.needs
