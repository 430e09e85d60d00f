"""One class's queue: each project's part of it in the project's own order. No I/O."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsec_scheduler.asks import Ask


@dataclass(slots=True)
class Line:
    """A class's queue: for each project what waits, what goes first first."""

    waiting: dict[str, list[tuple[float, int, Ask]]] = field(default_factory=dict)
    count: int = 0

    def add(self, ask: Ask, ageing_s: float) -> None:
        """Put an ask in its place."""
        # All age alike, so who goes before whom never changes.
        key = ask.asked_at - ask.priority * ageing_s
        bisect.insort(self.waiting.setdefault(ask.project, []), (key, ask.ask_id, ask))
        self.count += 1

    def remove(self, ask: Ask, ageing_s: float) -> None:
        """Take an ask out."""
        line = self.waiting[ask.project]
        at = bisect.bisect_left(line, (ask.asked_at - ask.priority * ageing_s, ask.ask_id))
        del line[at]
        self.count -= 1
        if not line:
            del self.waiting[ask.project]

    def asks(self) -> Iterator[Ask]:
        """Yield all, project by project."""
        for line in self.waiting.values():
            for _, _, ask in line:
                yield ask
