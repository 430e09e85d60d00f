"""Where room is left, once most nodes are full. No I/O."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable


class Remaining:
    """The nodes that may have room for sandboxes of one size: all that have any are among them.

    Each draw throws out those it finds full, and a node comes back when something on it has become
    free. So a draw costs what has become free since the last, however many nodes are full.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._known = set(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Take in a node on which something has become free."""
        if name not in self._known:
            self._known.add(name)
            self._names.append(name)

    def draw(
        self,
        most: int,
        has_room: Callable[[str], bool],
        usable: Callable[[str], bool],
        randomness: random.Random,
    ) -> list[str]:
        """Return at most so many random nodes with room that are usable for who asks."""
        names, kept = self._names, 0
        found: list[str] = []
        while kept < len(names) and len(found) < most:
            # Those looked at and kept are moved to the front.
            at = kept + int(randomness.random() * (len(names) - kept))
            name = names[at]
            if not has_room(name):
                names[at] = names[-1]
                names.pop()
                self._known.discard(name)
                continue
            names[at], names[kept] = names[kept], name
            kept += 1
            if usable(name):
                found.append(name)
        return found
