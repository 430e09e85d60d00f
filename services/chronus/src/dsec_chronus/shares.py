"""How much of a bounded thing each project has: no project may keep all others out."""

from __future__ import annotations

from collections import Counter
from typing import Final

_RESERVED_PART: Final = 4
"""One part in so many of a limit is beyond the reach of whoever has all the rest."""


class Shares:
    """Amounts by project, and their sum."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()
        self.total = 0

    def add(self, project: str, amount: int) -> None:
        """Count ``amount`` more, or less when it is negative."""
        self.total += amount
        self._of[project] += amount
        if not self._of[project]:
            del self._of[project]

    def limit_of(self, project: str, limit: int) -> int:
        """Return how much ``project`` may have while all together may have ``limit``."""
        others = self.total - self._of[project]
        return min(limit - limit // _RESERVED_PART, limit - others)

    def has_room(self, project: str, limit: int, more: int = 0) -> bool:
        """Return whether ``project`` is below its limit with ``more`` that is on its way."""
        return self._of[project] + more < self.limit_of(project, limit)

    def room_of(self, project: str, limit: int) -> int:
        """Return how much more ``project`` may take."""
        return max(self.limit_of(project, limit) - self._of[project], 0)

    def clear(self) -> None:
        """Count nothing any more."""
        self._of.clear()
        self.total = 0

    def counted(self) -> dict[str, int]:
        """Return the amounts by project."""
        return dict(self._of)
